"""Runs a user's function and leaves its parameters, gradients, buffers, inputs and random state as they were."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Guarded:
    """The tensors to put back. `protect` copies a tensor's values the first time it is about to be written."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._versions = contextlib.ExitStack()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._values

    def protect(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor not in self:
                self._values[id(tensor)] = (tensor, tensor.detach().clone())
                if not tensor.is_inference():
                    # Written and put back must not look like a mutation to an autograd graph the user still holds.
                    self._versions.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))

    def restore(self) -> None:
        with torch.no_grad(), self._versions:
            for tensor, value in self._values.values():
                tensor.copy_(value)


@contextlib.contextmanager
def untouched(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Guarded]:
    """Context in which `fn(*args, **kwargs)` may run; on exit everything reachable from them is as before.

    Buffers and tensor arguments are copied beforehand. Parameters are not (they may fill the device): a compiled graph
    that writes one protects it first, and a write outside a compiled graph raises RuntimeError.
    """
    parameters, others = _reachable(fn, args, kwargs)
    guarded = Guarded()
    guarded.protect(others)
    leaves = [t for t in (*parameters, *others) if t.is_leaf and t.requires_grad]
    gradients = [t.grad for t in leaves]
    versions = [_version(t) for t in parameters]
    try:
        with _random_state():
            for leaf in leaves:
                leaf.grad = None
            yield guarded
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        guarded.restore()
    lost = [t for t, v in zip(parameters, versions, strict=True) if _version(t) != v and t not in guarded]
    if lost:
        shapes = ", ".join(str(tuple(t.shape)) for t in lost)
        raise RuntimeError(
            f"fn wrote {len(lost)} parameter(s) of shape {shapes} outside the traced graphs, which cannot be undone: "
            "pass the forward or the loss, not a whole training step"
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _reachable(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """(parameters, buffers and plain tensors) that `fn` can see: itself, its arguments, closure and named globals."""
    found: dict[int, torch.Tensor] = {}
    for value in pytree.tree_leaves((_captured(fn), args, kwargs)):
        if isinstance(value, torch.nn.Module):
            found.update((id(t), t) for t in (*value.parameters(), *value.buffers()))
        elif isinstance(value, torch.Tensor):
            found[id(value)] = value
    parameters = [t for t in found.values() if isinstance(t, torch.nn.Parameter)]
    return parameters, [t for t in found.values() if not isinstance(t, torch.nn.Parameter)]


def _captured(fn: Callable[..., Any]) -> list[Any]:
    if isinstance(fn, functools.partial):
        return [*_captured(fn.func), list(fn.args), dict(fn.keywords)]
    if isinstance(fn, types.MethodType):
        return [fn.__self__, *_captured(fn.__func__)]
    if not isinstance(fn, types.FunctionType):
        return [fn]
    cells = []
    for cell in fn.__closure__ or ():
        # A cell whose variable is not bound yet holds nothing to protect.
        with contextlib.suppress(ValueError):
            cells.append(cell.cell_contents)
    return [*cells, *(fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__)]
