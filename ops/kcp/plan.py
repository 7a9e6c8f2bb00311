"""The plan of one rank: segments, what each needs, who sends which fragment to whom. Host integers only.

A plan is a pure function of (partition, rank, P of every rank). It travels into the ops as one int64 CPU tensor, so a
compiled graph takes a new pack without recompiling; the ops parse it once per content.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from .partition import CHUNK, Fragment, Partition
from .planner import segment_lengths

_HEADER = 4  # rank, world_size, documents, fragments
_COLUMNS = 4  # rank, document, start, end
# Walks in parts overlap the exchange but launch once a part: with more parts than this it is not worth it.
MOST_RUNS = 6


class Segment(NamedTuple):
    """A run of whole chunks of one local fragment; `start`, `end` are local positions on the rank."""

    fragment: int  # index into RankPlan.fragments
    start: int
    end: int
    first: bool  # opens its document: its start state is initial_state, it needs no map M
    last: bool  # closes its document: nothing follows it, it needs no summary


class Run(NamedTuple):
    """Segments [first, last) of a rank, which are tokens [start, end) and chunks [first_chunk, last_chunk) of it."""

    first: int
    last: int
    start: int
    end: int
    first_chunk: int
    last_chunk: int
    whole: bool  # all segments of the rank


class Walks(NamedTuple):
    """A rank's segments, as runs in the order of their walks."""

    sending: list[Run]  # end in a state that travels, from a state known here: no summary foretells it
    ready: list[Run]  # wait for no other rank
    waiting: list[Run]  # start from a state of another rank

    @property
    def sent(self) -> set[int]:
        """Segments of `sending`."""
        return {i for run in self.sending for i in range(run.first, run.last)}


def needs_map(s: Segment) -> bool:
    """Whether a state passes through the segment from outside to outside."""
    return not s.first and not s.last


@dataclass(frozen=True, eq=False)
class RankPlan:
    """Everything one rank does. `chains[d]` lists the global fragment indices of document d in order.

    Compared by identity: equal tables give the same object (`decode_plan`).
    """

    rank: int
    world_size: int
    num_documents: int
    row: tuple[int, ...]
    fragments: tuple[Fragment, ...]

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        chains: list[list[int]] = [[] for _ in range(self.num_documents)]
        for i, fragment in enumerate(self.fragments):
            chains[fragment.document].append(i)
        return tuple(map(tuple, chains))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The rank's segments in local order."""
        out: list[Segment] = []
        offset = 0
        for i, f in enumerate(self.fragments):
            if f.rank != self.rank:
                continue
            stop, position = offset + f.end - f.start, offset
            lengths = segment_lengths(f.num_chunks, self.row[self.rank])
            for chunks in lengths[:-1]:
                end = position + chunks * CHUNK
                out.append(Segment(i, position, end, position == offset and not f.has_pred, False))
                position = end
            out.append(Segment(i, position, stop, position == offset and not f.has_pred, not f.has_succ))
            offset = stop
        return tuple(out)

    @cached_property
    def segment_chunks(self) -> tuple[int, ...]:
        """Chunks before each local segment, and their number."""
        return tuple(accumulate((-((s.start - s.end) // CHUNK) for s in self.segments), initial=0))

    def runs(self, chosen: Iterable[int]) -> list[Run]:
        """The chosen local segments (ascending) as runs of consecutive ones."""
        out: list[list[int]] = []
        for i in chosen:
            if out and out[-1][1] == i:
                out[-1][1] = i + 1
            else:
                out.append([i, i + 1])
        chunks = self.segment_chunks
        return [
            Run(
                a, b, self.segments[a].start, self.segments[b - 1].end, chunks[a], chunks[b],
                b - a == len(self.segments),
            )
            for a, b in out
        ]  # fmt: skip

    @cached_property
    def forward_walks(self) -> Walks:
        return self._walks(adjoint=False)

    @cached_property
    def adjoint_walks(self) -> Walks:
        return self._walks(adjoint=True)

    def _walks(self, adjoint: bool) -> Walks:
        """A fragment of one segment that opens the flow of its document is walked before the exchange and sends the
        state it ends in. Of several segments, summaries are quicker: they end together, the walk then starts with all.
        """
        pieces = Counter(s.fragment for s in self.segments)
        sending, ready, waiting = [], [], []
        for i, s in enumerate(self.segments):
            f = self.fragments[s.fragment]
            enters, leaves = (f.has_succ, f.has_pred) if adjoint else (f.has_pred, f.has_succ)
            (waiting if enters else sending if leaves and pieces[s.fragment] == 1 else ready).append(i)
        walks = Walks(self.runs(sending), self.runs(ready), self.runs(waiting))
        if sum(map(len, walks)) <= MOST_RUNS:
            return walks
        everything = self.runs(range(len(self.segments)))
        return Walks([], [], everything) if waiting else Walks([], everything, [])

    @cached_property
    def hops(self) -> int:
        """Links of the longest chain: every rank takes part in that many ring steps."""
        return max((len(links) - 1 for links in self.chains), default=0)

    @property
    def crosses(self) -> bool:
        return self.hops > 0


def encode_plan(part: Partition, rank: int, row: Sequence[int]) -> torch.Tensor:
    """The int64 CPU tensor `decode_plan` reads: header, P of every rank, then (rank, document, start, end) rows."""
    flat = array("q", (rank, part.world_size, len(part.cu_seqlens) - 1, len(part.fragments), *row))
    flat.extend(chain.from_iterable(fragment[:_COLUMNS] for fragment in part.fragments))
    table = torch.frombuffer(flat, dtype=torch.int64)
    _keep(flat.tobytes(), RankPlan(rank, part.world_size, len(part.cu_seqlens) - 1, tuple(row), part.fragments))
    return table


# Parsed plans by content, newest last: a step parses its plan once for all layers, forward and backward.
_PARSED: OrderedDict[bytes, RankPlan] = OrderedDict()
_PARSED_LIMIT = 16


def decode_plan(table: torch.Tensor) -> RankPlan:
    """The plan written in `table` (from `encode_plan`), cached by content and never by tensor identity."""
    key = table.numpy().tobytes()
    plan = _PARSED.get(key)
    return _keep(key, _parse(table.tolist()) if plan is None else plan)


def _keep(key: bytes, plan: RankPlan) -> RankPlan:
    _PARSED[key] = plan
    _PARSED.move_to_end(key)
    while len(_PARSED) > _PARSED_LIMIT:
        _PARSED.popitem(last=False)
    return plan


def _parse(flat: list[int]) -> RankPlan:
    rank, world, documents, count = flat[:_HEADER]
    row = flat[_HEADER : _HEADER + world]
    body = flat[_HEADER + world :]
    rows = [tuple(body[_COLUMNS * i : _COLUMNS * (i + 1)]) for i in range(count)]
    fragments = []
    for i, (owner, document, start, end) in enumerate(rows):
        pred = i > 0 and rows[i - 1][1] == document
        succ = i + 1 < count and rows[i + 1][1] == document
        fragments.append(Fragment(owner, document, start, end, -((start - end) // CHUNK), pred, succ))
    return RankPlan(rank, world, documents, tuple(row), tuple(fragments))
