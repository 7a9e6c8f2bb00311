"""The planner written out job by job, from its definitions (no multisets, no caches), for comparison."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

# (rank, document, start, end, chunks, continues before, continues after), as ple_gdn's Fragment
Row = tuple[int, int, int, int, int, bool, bool]
Rows = list[Row]


def fragment_rows(bounds: list[int], world: int, layout: str) -> Rows:
    """Every token's owner is asked one piece at a time; neighbours of one document and rank are joined."""
    rows: list[list[int]] = []
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        base, length = (start, end - start) if layout == "zigzag_per_document" else (0, bounds[-1])
        blocks = world if layout == "contiguous" else 2 * world
        for block in range(blocks):
            a = max(start, base + length * block // blocks)
            b = min(end, base + length * (block + 1) // blocks)
            rank = block if layout == "contiguous" else min(block, blocks - 1 - block)
            if a >= b:
                continue
            if rows and rows[-1][:2] == [rank, document]:
                rows[-1][3] = b
            else:
                rows.append([rank, document, a, b])
    return [(r, d, a, b, (b - a + 63) // 64, a > bounds[d], b < bounds[d + 1]) for r, d, a, b in rows]


def makespan(jobs: list[int], machines: int) -> int:
    loads = [0] * machines
    for job in sorted(jobs, reverse=True):
        heapq.heapreplace(loads, loads[0] + job)
    return max(loads)


def segments(chunks: int, P: int) -> list[int]:
    p = max(1, min(P, chunks))
    return [chunks * (i + 1) // p - chunks * i // p for i in range(p)]


class Rank:
    """One rank's rows with the walk of every P asked for, so that the rules below can be written plainly."""

    def __init__(self, rows: Rows, heads: int, machines: int) -> None:
        self.rows, self.heads, self.machines = rows, heads, machines
        self.longest = max((row[4] for row in rows), default=0)
        self.limit = max(1, min(24, self.longest // 16))
        self._walks: dict[int, int] = {}

    def count(self, P: int) -> int:
        return self.heads * sum(min(P, row[4]) for row in self.rows)

    def walk(self, P: int) -> int:
        if P not in self._walks:
            tape, summary = [], []
            for row in self.rows:
                lengths = segments(row[4], P)
                tape += lengths * self.heads
                summary += (lengths if row[5] or row[6] else lengths[:-1]) * self.heads
            self._walks[P] = 5 * makespan(summary, self.machines) + 3 * makespan(tape, self.machines)
        return self._walks[P]


def one(rank: Rank) -> int:
    return 1


def occ(rank: Rank) -> int:
    enough = (P for P in range(1, rank.limit + 1) if rank.count(P) >= rank.machines)
    return next(enough, rank.limit)


def wave_fill1(rank: Rank) -> int:
    costs = [
        -(-rank.count(P) // rank.machines) * -(-rank.longest // P) for P in range(1, rank.limit + 1)
    ]  # waves x longest segment
    return next(P for P, cost in enumerate(costs, 1) if 100 * cost <= 102 * min(costs))


PROGRAMS: dict[str, Callable[[Rank], int]] = {"one": one, "occ": occ, "wave_fill1": wave_fill1}


def slowest(ranks: list[Rank], row: list[int]) -> int:
    return max(rank.walk(P) for rank, P in zip(ranks, row, strict=True))


def row_cost(ranks: list[Rank]) -> list[int]:
    rows = [[program(rank) for rank in ranks] for program in PROGRAMS.values()]
    best = min(rows, key=lambda row: slowest(ranks, row))
    return best if 100 * slowest(ranks, best) <= 90 * slowest(ranks, rows[0]) else rows[0]


def row_cost_lpt(ranks: list[Rank]) -> list[int]:
    base = row_cost(ranks)
    row = list(base)
    for i, rank in enumerate(ranks):
        if base[i] > 1 and 1 <= len(rank.rows) <= 3 and rank.longest >= 257:
            least = min(rank.walk(P) for P in range(2, rank.limit + 1))
            P = next(P for P in range(2, rank.limit + 1) if 100 * rank.walk(P) <= 102 * least)
            if rank.walk(P) <= rank.walk(base[i]):
                row[i] = P
    return row if 100 * slowest(ranks, row) <= 96 * slowest(ranks, base) else base


def plan_row(bounds: list[int], world: int, layout: str, heads: int, machines: int, rule: str) -> list[int]:
    rows = fragment_rows(bounds, world, layout)
    ranks = [Rank([row for row in rows if row[0] == r], heads, machines) for r in range(world)]
    if rule == "row_cost":
        return row_cost(ranks)
    return row_cost_lpt(ranks) if rule == "row_cost_lpt" else [PROGRAMS[rule](rank) for rank in ranks]
