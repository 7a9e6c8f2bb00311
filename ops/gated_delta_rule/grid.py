"""The chunk grid on the host: which rows of which documents the walk of the reference visits together.

Chunks of 64 rows restart at every document. Documents are independent, so the walk takes chunk number c of many
documents in one step; sorted by length, the documents still running at step c are a prefix of the group. A thousand
one-token documents are then a few steps, and one long document is one step per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from ..varlen import CHUNK

# Documents walk together until one [documents, HV, 64, width] tile reaches this many elements (2 MiB of fp32), which
# bounds the scratch of a step whatever the number of documents.
TILE_ELEMENTS = 1 << 19


class Documents(NamedTuple):
    """Host view of a batch: document n is rows `starts[n] : starts[n] + lengths[n]` of the flattened `[B * T]` rows."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def chunk_offsets(self) -> list[int]:
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + -(-length // CHUNK))
        return offsets


class Step(NamedTuple):
    """Chunk number c of the first `count` documents of a group.

    Attributes:
        count: documents still running.
        chunks: `[count]` rows of the h tape.
        rows: flattened token rows, in (document, row) order, of the valid rows only.
        slots: position of each of `rows` in the `count * 64` grid; None when every row is valid.
    """

    count: int
    chunks: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor | None

    def gather(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of `flat` [rows, heads, ...] as a contiguous `[count, heads, 64, ...]` tile; padding rows are zero."""
        picked = flat.index_select(0, self.rows).to(dtype)
        if self.slots is not None:
            padded = picked.new_zeros(self.count * CHUNK, *flat.shape[1:])
            picked = padded.index_copy_(0, self.slots, picked)
        return picked.view(self.count, CHUNK, *flat.shape[1:]).transpose(1, 2).contiguous()

    def scatter(self, flat: torch.Tensor, tile: torch.Tensor) -> None:
        """Writes the valid rows of a `[count, heads, 64, ...]` tile to `flat`, rounding to its dtype."""
        values = tile.transpose(1, 2).reshape(self.count * CHUNK, *flat.shape[1:]).to(flat.dtype)
        flat.index_copy_(0, self.rows, values if self.slots is None else values.index_select(0, self.slots))


class Group(NamedTuple):
    """Documents walked together, longest first; `order` are their numbers."""

    order: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    first_chunks: torch.Tensor
    host_lengths: tuple[int, ...]

    def step_count(self) -> int:
        return -(-self.host_lengths[0] // CHUNK)

    def step(self, c: int) -> Step:
        first = c * CHUNK
        count = sum(length > first for length in self.host_lengths)
        inside = torch.arange(first, first + CHUNK, device=self.starts.device)
        rows = (self.starts[:count, None] + inside).view(-1)
        slots = None
        if self.host_lengths[count - 1] < first + CHUNK:
            slots = (inside < self.lengths[:count, None]).view(-1).nonzero().view(-1)
            rows = rows.index_select(0, slots)
        return Step(count, self.first_chunks[:count] + c, rows, slots)


def documents_of(batch: int, tokens: int, boundaries: tuple[int, ...] | None) -> Documents:
    """One document per batch row, or the documents of checked `boundaries` in the single row."""
    if boundaries is None:
        return Documents(tuple(b * tokens for b in range(batch)), (tokens,) * batch)
    return Documents(boundaries[:-1], tuple(end - start for start, end in pairwise(boundaries)))


def group_size(value_heads: int, key_width: int, value_width: int) -> int:
    """Documents per group: see TILE_ELEMENTS."""
    return max(1, TILE_ELEMENTS // (value_heads * CHUNK * max(CHUNK, key_width, value_width)))


def groups(documents: Documents, size: int, device: torch.device) -> Iterator[Group]:
    """Documents with rows, in groups of at most `size`, by falling length (ties by number, so the order is fixed)."""
    filled = (n for n, length in enumerate(documents.lengths) if length)
    order = sorted(filled, key=lambda n: -documents.lengths[n])
    offsets = documents.chunk_offsets()
    for at in range(0, len(order), size):
        members = order[at : at + size]
        columns = (
            members,
            [documents.starts[n] for n in members],
            [documents.lengths[n] for n in members],
            [offsets[n] for n in members],
        )
        yield Group(
            *(torch.tensor(column, dtype=torch.int64, device=device) for column in columns),
            tuple(documents.lengths[n] for n in members),
        )
