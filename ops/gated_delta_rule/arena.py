"""The arena: every temporary of one call whose size grows with T, under a name, 256-byte aligned.

`workspace.py` states the same bytes as formulas, and tests hold the two together with `recording()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .tapes import Tapes, tape_dtype, tape_shapes

ALIGNMENT = 256

_recordings: list[list[Arena]] = []


class Arena:
    """Hands out the temporaries of one call: slices of the caller's workspace if there is one, else new tensors.

    Attributes:
        bound: bytes of each buffer by name, alignment included. All live until the call returns, so their sum is the
            peak.
    """

    def __init__(self, device: torch.device, workspace: torch.Tensor | None = None) -> None:
        self.device = device
        self.workspace = workspace
        self.bound: dict[str, int] = {}
        for recording in _recordings:
            recording.append(self)

    @property
    def peak(self) -> int:
        return sum(self.bound.values())

    def bind(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor.

        Raises:
            ValueError: the workspace is used up.
        """
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        start = self.peak
        self.bound[name] = -(-size // ALIGNMENT) * ALIGNMENT
        if self.workspace is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if self.peak > self.workspace.shape[0]:
            raise ValueError(f"workspace: expected at least {self.peak} bytes, got {self.workspace.shape[0]}")
        return self.workspace[start : start + size].view(dtype).view(shape)


def bind_tapes(
    arena: Arena, q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Buffers for tapes that are needed and were not kept."""
    shapes = tape_shapes(q, v, cu_seqlens)
    return {name: arena.bind(name, shapes[name], tape_dtype(name, q)) for name in names}


def complete_tapes(
    arena: Arena, tapes: Tapes, q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> Tapes:
    """The tapes with zeroed arena buffers where one is missing, for the replay to fill."""
    made = bind_tapes(arena, q, v, cu_seqlens, tapes.missing())
    for buffer in made.values():
        buffer.zero_()
    return tapes._replace(**made)


def being_recorded() -> bool:
    return bool(_recordings)


@contextmanager
def recording() -> Iterator[list[Arena]]:
    """Collects the arena of every call made inside, in order."""
    arenas: list[Arena] = []
    _recordings.append(arenas)
    try:
        yield arenas
    finally:
        _recordings.remove(arenas)
