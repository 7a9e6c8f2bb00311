"""Who owns which tokens of a pack: contiguous, zigzag and per-document zigzag layouts over the ranks of a group.

Everything here is exact integer host code, a pure function of (cu_seqlens, world_size, layout), so that every rank
computes the same partition without talking. Definitions: GDN.md §4.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from ..validation import check_int
from ..varlen import Packing, check_index_vector

CHUNK = 64
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")


class Fragment(NamedTuple):
    """A maximal contiguous run of one document on one rank: tokens [start, end) of the pack.

    has_pred / has_succ: the document goes on before / after this run on another rank. The chunk grid restarts at start.
    """

    rank: int
    document: int
    start: int
    end: int
    num_chunks: int
    has_pred: bool
    has_succ: bool


@dataclass(frozen=True)
class Partition:
    """Ownership of every token of a pack. Local order on a rank is ascending global position."""

    cu_seqlens: tuple[int, ...]
    world_size: int
    layout: str
    fragments: tuple[Fragment, ...]

    def __hash__(self) -> int:
        # The fragments follow from these; hashing 15,000 of them would cost 5 ms.
        return hash((self.cu_seqlens, self.world_size, self.layout))

    @cached_property
    def by_rank(self) -> tuple[tuple[Fragment, ...], ...]:
        rows: list[list[Fragment]] = [[] for _ in range(self.world_size)]
        for fragment in self.fragments:
            rows[fragment.rank].append(fragment)
        return tuple(map(tuple, rows))

    @property
    def total_tokens(self) -> int:
        return self.cu_seqlens[-1]

    def local_tokens(self, rank: int) -> int:
        """Number of tokens rank owns."""
        return sum(f.end - f.start for f in self.by_rank[rank])

    def positions(self, rank: int) -> torch.Tensor:
        """Global position of each of the rank's tokens, int64 [local_tokens(rank)], in local order."""
        runs = [torch.arange(f.start, f.end) for f in self.by_rank[rank]]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)

    def local_cu_seqlens(self, rank: int) -> list[int]:
        """Boundaries of the rank's fragments in local positions, one entry more than fragments."""
        bounds = [0]
        for fragment in self.by_rank[rank]:
            bounds.append(bounds[-1] + fragment.end - fragment.start)
        return bounds


def kcp_partition(
    cu_seqlens: torch.Tensor | Packing | Sequence[int], world_size: int, layout: str = "contiguous"
) -> Partition:
    """Splits a pack of documents over `world_size` ranks; every token is owned exactly once.

    Args:
        cu_seqlens: [N+1] document boundaries, integers, first 0, not decreasing, or a `Packing`. A tensor on a device
            is read once.
        world_size: number of ranks, at least 1; ranks may own nothing.
        layout: "contiguous" (rank r owns [rT/W, (r+1)T/W)), "zigzag" (2W blocks of the pack, rank r owns blocks r and
            2W-1-r, which balances causal work) or "zigzag_per_document" (the same cuts inside each document).

    Raises:
        ValueError: boundaries that do not start at 0 or decrease, world_size < 1, an unknown layout.
        TypeError: boundaries or world_size that are not integers.
    """
    bounds = _boundaries(cu_seqlens)
    check_count("world_size", world_size)
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    return _partition(bounds, world_size, layout)


@lru_cache(maxsize=16)
def _partition(bounds: tuple[int, ...], world_size: int, layout: str) -> Partition:
    return Partition(bounds, world_size, layout, tuple(_fragments(bounds, world_size, layout)))


def check_partition(part: object) -> None:
    if not isinstance(part, Partition):
        raise TypeError(f"part: expected the result of kcp_partition, got {type(part).__name__}")


def check_count(name: str, value: object) -> None:
    check_int(name, value)
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def check_rank(rank: object, part: Partition) -> None:
    check_int("rank", rank)
    if not 0 <= rank < part.world_size:
        raise ValueError(f"rank: expected 0 <= rank < {part.world_size}, got {rank}")


def _boundaries(cu_seqlens: torch.Tensor | Packing | Sequence[int]) -> tuple[int, ...]:
    if isinstance(cu_seqlens, Packing):
        cu_seqlens = cu_seqlens.cu_seqlens
    if isinstance(cu_seqlens, torch.Tensor):
        check_index_vector("cu_seqlens", cu_seqlens)
        if cu_seqlens.is_meta:
            raise ValueError("cu_seqlens: expected a tensor with values, got one on the meta device")
        cu_seqlens = cu_seqlens.tolist()
    elif not isinstance(cu_seqlens, Sequence) or isinstance(cu_seqlens, str):
        raise TypeError(f"cu_seqlens: expected a tensor or a sequence of integers, got {type(cu_seqlens).__name__}")
    bounds = tuple(cu_seqlens)
    for b in bounds:
        if not isinstance(b, int) or isinstance(b, bool):
            raise TypeError(f"cu_seqlens: expected integers, got {b!r}")
    if not bounds or bounds[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {list(bounds[:1])}")
    for a, b in itertools.pairwise(bounds):
        if a > b:
            raise ValueError(f"cu_seqlens: expected non-decreasing boundaries, got {a} then {b}")
    check_int("cu_seqlens", bounds[-1])
    return bounds


def _fragments(bounds: tuple[int, ...], world: int, layout: str) -> list[Fragment]:
    """Cut every document at the layout's cuts, drop empty pieces, merge touching pieces of one document and rank."""
    blocks = world if layout == "contiguous" else 2 * world
    owners = [*range(world)] if layout == "contiguous" else [*range(world), *reversed(range(world))]
    per_document = layout == "zigzag_per_document"
    cuts, total = [], bounds[-1]
    if not per_document:
        cuts = [total * j // blocks for j in range(blocks + 1)]
    out: list[Fragment] = []
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        first, last = 0, blocks - 1
        if per_document:
            length = end - start
            cuts = [start + length * j // blocks for j in range(blocks + 1)]
        else:
            first, last = max(bisect_right(cuts, start) - 1, 0), min(bisect_left(cuts, end), blocks) - 1
        a, rank = start, owners[first]  # the open run: pieces join it while the rank stays the same
        for block in range(first + 1, last + 1):
            b = cuts[block]
            if owners[block] == rank or b == cuts[block + 1]:
                continue
            if b > a:
                out.append(Fragment(rank, document, a, b, -((a - b) // CHUNK), a > start, True))
                a = b
            rank = owners[block]
        out.append(Fragment(rank, document, a, end, -((a - end) // CHUNK), a > start, False))
    return out
