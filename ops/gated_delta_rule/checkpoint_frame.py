"""The checkpoint region a call runs in, read from the hooks of `torch.utils.checkpoint(use_reentrant=False)`.

Both of its passes keep a pair of saved-tensor hooks on top of the hook stack. The forward's appends one holder to
`frame.weak_holders` for every tensor an op saves; the rerun's counts saved tensors in `frame.recomp_counter[gid]`, and
with early stop ends the rerun at the last holder. So the counts prove which call of the region saves last. These are
private names: `torch_versions.VERIFIED_CHECKPOINTS` lists the releases whose names and order were checked by running.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_MODULE = "torch.utils.checkpoint"
_autograd = torch._C._autograd


class Region(NamedTuple):
    """The innermost region, in its forward (`gid` None) or in the rerun that backward `gid` asked for."""

    frame: Any
    gid: Any

    @property
    def rerun(self) -> bool:
        return self.gid is not None

    @property
    def total(self) -> int:
        """Tensors saved so far; all of the region's once its forward is through."""
        return len(self.frame.weak_holders)

    @property
    def position(self) -> int:
        """Tensors saved before the next one, in this pass."""
        return self.frame.recomp_counter[self.gid] if self.rerun else self.total

    @property
    def early_stop(self) -> bool:
        return self.frame.early_stop

    @property
    def name(self) -> str:
        """Class of the checkpointed module, or the function's name."""
        fn = _closure(self.frame.recompute_fn).get("fn")
        while isinstance(fn, functools.partial):
            fn = fn.func
        fn = getattr(fn, "__self__", fn)  # a module's bound method
        return getattr(fn, "__qualname__", None) or type(fn).__name__


def pack_hooks() -> list[Callable]:
    """Pack hooks of the calling thread, innermost first; the stack is as before afterwards."""
    if not _autograd._saved_tensors_hooks_is_enabled():
        return []
    pairs = []
    # Only the top can be read: take them off one by one and put them back.
    try:
        while (pair := _autograd._top_saved_tensors_default_hooks(False)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            pairs.append(pair)
    finally:
        for pair in reversed(pairs):
            _autograd._push_saved_tensors_default_hooks(*pair)
    return [pack for pack, _ in pairs]


def of_checkpoint(pack: Callable) -> bool:
    return getattr(pack, "__module__", None) == _MODULE


def region_of(pack: Callable) -> Region:
    """The region a checkpoint's pack hook belongs to, on a verified release."""
    names = _closure(pack)
    return (
        Region(names["target_frame_ref"](), names["gid"])
        if "target_frame_ref" in names
        else Region(names["frame"], None)
    )


def inside_a_backward() -> bool:
    """Whether this thread runs a backward: a forward here is a rerun, of `use_reentrant=True` where no hook shows."""
    return torch._C._current_graph_task_id() != -1


def selective() -> bool:
    """Whether a selective checkpoint keeps the outputs of chosen ops in this region."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    kinds = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())


def _closure(function: Callable) -> dict[str, Any]:
    """Free variables of a function below its wrappers, those that have a value."""
    function = inspect.unwrap(function)
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # empty: a local of the enclosing function that was never assigned
            continue
    return values
