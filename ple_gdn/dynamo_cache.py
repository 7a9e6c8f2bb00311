"""Dynamo's cache of compiled code, for a trace that must leave none of it behind and use none of the user's."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import config as dynamo_config
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.guards import DeletedGuardManagerWrapper

# A trace adds one cache entry a frame beside the user's; it must not trip over their recompile limit.
UNLIMITED = 1 << 30


class _Nothing:
    """What a dropped entry says it was compiled for: nothing that a frame can hold."""


class _Uncounted(DeletedGuardManagerWrapper):
    """Guards of a dropped entry. Dynamo keeps it in its list and counts it towards `recompile_limit` with those of the
    same objects, of which it has none. (`accumulated_recompile_limit`, 256 by default, counts every entry.)"""

    nothing = _Nothing()

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.id_matched_objs = {"": weakref.ref(self.nothing)}


@contextlib.contextmanager
def forgotten(backend: Callable[..., Any]) -> Iterator[None]:
    """Drops, on exit, the code compiled with `backend` inside, and with it the graphs that it holds."""
    codes: list[types.CodeType] = []
    hook = register_bytecode_hook(lambda code, new_code: codes.append(code))
    limits = {"recompile_limit": UNLIMITED, "accumulated_recompile_limit": UNLIMITED, "suppress_errors": False}
    try:
        with dynamo_config.patch(limits):
            yield
    finally:
        hook.remove()
        for code in dict.fromkeys(codes):
            for entry in _debug_get_cache_entry_list(code):
                if getattr(entry.backend, "compiler_fn", entry.backend) is backend:
                    reason = "traced for ple_gdn.explain only"
                    entry.guard_manager.extra_state.invalidate(entry, _Uncounted(reason))


@contextlib.contextmanager
def uncompiled(fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`fn` as it was before `torch.compile(fn)` or `fn.compile()`."""
    fn = getattr(fn, "_orig_mod", fn)
    while hasattr(fn, "_torchdynamo_orig_callable"):
        fn = fn._torchdynamo_orig_callable
    in_place = fn._compiled_call_impl if isinstance(fn, torch.nn.Module) else None
    if in_place is None:
        yield fn
        return
    fn._compiled_call_impl = None
    try:
        yield fn
    finally:
        fn._compiled_call_impl = in_place
