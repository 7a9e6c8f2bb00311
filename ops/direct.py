"""Whether an eager call of a raw op may skip the dispatcher: where nothing between the two could see the difference.

The dispatcher costs a call with autograd about 0.2 ms of host time (14 arguments boxed four times, a generated autograd
function), as much as a forward of the gated delta rule over 4,096 tokens takes on the GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

from .schemas import NAMESPACE

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@functools.cache
def _plain_keys(device_type: str) -> int | None:
    """Dispatch keys of a plain tensor; None for devices on which an op has no implementation of its own (meta)."""
    if device_type not in ("cpu", "cuda"):
        return None
    with torch.inference_mode(False):  # a first call in inference mode would make an inference tensor
        return torch._C._dispatch_keys(torch.empty(0, device=device_type)).raw_repr()


_KEY = torch._C.DispatchKey
_ALWAYS = torch._C.DispatchKeySet(_KEY.BackendSelect)
# Keys that a thread adds to every call when nothing is going on: the second set is that of inference mode.
_ORDINARY = ((_ALWAYS | torch._C.DispatchKeySet(_KEY.ADInplaceOrView)).raw_repr(), _ALWAYS.raw_repr())


def _ordinary_thread() -> bool:
    """False where the thread adds keys (pre-dispatch tracing: no mode is on a stack that C knows) or, with gradients
    enabled, takes autograd away (the body of somebody's op, whose outputs get no graph of their own)."""
    if torch._C._dispatch_tls_local_include_set().raw_repr() not in _ORDINARY:
        return False
    return not (torch.is_grad_enabled() and torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY.AutogradFunctionality))


def unobserved(tensors: Iterable[torch.Tensor | None]) -> bool:
    """True for plain strided tensors outside of every mode, transform, trace, compiler and profiler.

    The dispatch keys of a tensor tell subclasses, fakes, wrapped, sparse, lazily negated, inference and meta tensors.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()
        or not _ordinary_thread()
    ):
        return False
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN or torch._C._dispatch_keys(t).raw_repr() != _plain_keys(t.device.type):
            return False
    return True


_AUTOCAST = (_KEY.AutocastCUDA, _KEY.AutocastCPU)


def cast_by_a_rule(name: str) -> bool:
    """True where autocast is on and somebody gave the op a rule (`torch.library.register_autocast`); without one an op
    computes on the dtypes that reach it. Asked each time: a rule may be registered at any moment."""
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        for key in _AUTOCAST
        if not torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    )


def recorded(name: str) -> contextlib.AbstractContextManager:
    """Shows a direct call by the op's name to observers of which this thread knows nothing: a profiler that records
    all threads, or one that was started from outside of the process."""
    return torch._C._profiler._RecordFunctionFast(f"{NAMESPACE}::{name}")
