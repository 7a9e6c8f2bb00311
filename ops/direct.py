"""Whether an eager call of a raw op may skip the dispatcher: where nothing between the two could see the difference.

The dispatcher costs a call with autograd about 0.2 ms of host time (14 arguments boxed four times, a generated autograd
function), as much as a forward of the gated delta rule over 4,096 tokens takes on the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@functools.cache
def _plain_keys(device_type: str) -> int | None:
    """Dispatch keys of a plain tensor; None for devices on which an op has no implementation of its own (meta)."""
    if device_type not in ("cpu", "cuda"):
        return None
    return torch._C._dispatch_keys(torch.empty(0, device=device_type)).raw_repr()


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
    ):
        return False
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN or torch._C._dispatch_keys(t).raw_repr() != _plain_keys(t.device.type):
            return False
    return True
