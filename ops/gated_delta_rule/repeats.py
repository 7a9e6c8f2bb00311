"""A call whose tensors all lie where those of an earlier one lay launches its kernels again, as they were.

A training step calls each layer with tensors at the addresses of the step before: the allocator is given the same
requests in the same order. What a call passes to its kernels follows from addresses, shapes and options, and it is most
of what a call costs the host: at 8,192 tokens a backward takes .7 ms of the GPU and took 1.0 of the host, for seven
launches of up to 60 arguments and 30 views of buffers.

The first call of a shape says how many bytes its temporaries take; from then on they are slices of one block. The
second with the same addresses is recorded, and those after it repeat the record. A call is only recorded if it made
nothing but views, so that no address in the record belongs to memory that was let go or to a copy of an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..triton_launch import Launches, record
from . import configs
from .arena import Arena, being_recorded

Tensor = torch.Tensor
Body = Callable[[Arena], None]
MOST_SHAPES, MOST_RECORDS = 256, 2048  # a record of eleven launches is 8 KB
DEVICES = ("cuda",)


class _Shape:
    """Calls of one shape: bytes of their temporaries."""

    def __init__(self, size: int) -> None:
        self.size = size


_shapes: dict[tuple[Any, ...], _Shape] = {}
# By shape and addresses; None where these were seen once.
_records: dict[tuple[Any, ...], Launches | type[_Never] | None] = {}


def forget() -> None:
    """Every record, for whoever replaces what a record holds."""
    _shapes.clear()
    _records.clear()


class _ViewsAlone(TorchDispatchMode):
    """`held` turns False at the first op that is not a view of what it was given."""

    held = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.held = self.held and func.is_view
        return func(*args, **(kwargs or {}))


class _New:
    """In the place of a record of addresses not seen before."""


class _Never:
    """In the place of a record of a call that cannot be repeated."""


def _record(device: torch.device, body: Body, arena: Arena) -> Launches | type[_Never] | None:
    """Runs `body`; its launches, or None where one of them was not noted, which need not be so the next time."""
    with _ViewsAlone() as views, record(device) as launches:
        body(arena)
    if not views.held:
        return _Never
    return launches if launches.complete else None


def run(
    what: tuple[Any, ...], inputs: Sequence[Tensor | None], made: Sequence[Tensor], workspace: Tensor | None,
    device: torch.device, body: Body,
) -> None:  # fmt: skip
    """`body(arena)`, which launches kernels on `inputs`, on what the call made, and on temporaries of the arena.

    Args:
        what: everything else that the launches follow from: which call it is, its options, its numbers.
        inputs: contiguous tensors.
        workspace: the caller's, for the arena.
    """
    if device.type not in DEVICES or being_recorded():
        return body(Arena(device, workspace))
    given = [(t.shape, t.dtype) if t is not None else None for t in (*inputs, workspace)]
    key = (*what, *configs.settings(), device, *given, *[math.copysign(1.0, x) for x in what if x == 0.0])
    shape = _shapes.get(key)
    if shape is None:
        arena = Arena(device, workspace)
        body(arena)
        if len(_shapes) >= MOST_SHAPES:
            forget()
        _shapes[key] = _Shape(arena.peak)
        return None
    block = workspace if workspace is not None else torch.empty(shape.size, dtype=torch.uint8, device=device)
    place = (shape, block.data_ptr(), *[t.data_ptr() if t is not None else None for t in (*inputs, *made)])
    found = _records.get(place, _New)
    if isinstance(found, Launches) and found.again():
        return None
    arena = Arena(device, block)
    if found is None:
        _records[place] = _record(device, body, arena)
        return None
    if found is _New:
        if len(_records) >= MOST_RECORDS:
            _records.clear()
        _records[place] = None
    return body(arena)
