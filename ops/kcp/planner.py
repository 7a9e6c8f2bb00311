"""How many segments P each rank cuts its fragments into: pure host planner, exact integers, identical on every rank.

A plan value P cuts a fragment of nc chunks into p = min(P, nc) segments. The modelled cost of a rank ("walk") is
5 x LPT(summary jobs) + 3 x LPT(tape jobs) in chunk steps, with HV jobs per segment on `sm_count` machines (GDN.md §5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from .partition import Fragment, Partition, check_count, check_partition, check_rank

SUMMARY_WEIGHT, TAPE_WEIGHT = 5, 3
MAX_SEGMENTS = 24  # more segments only lengthen the serial fold, about 2.5 us each
MIN_SEGMENT_CHUNKS = 16
LEAVE_ONE_PERCENT = 10  # gain demanded before leaving P = 1: splitting has costs the walk does not model
SEARCH_MARGIN_PERCENT, ROW_MARGIN_PERCENT = 2, 4
LPT_MAX_FRAGMENTS, LPT_MIN_CHUNKS = 3, 257
H200_SM_COUNT = 132
ROW_RULES = ("row_cost", "row_cost_lpt")


class RankJobs:
    """One rank's fragments as a multiset: (chunks, crosses ranks) -> count. The walk depends on nothing else."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.num_fragments = len(fragments)
        self.kinds = Counter([(chunks, pred or succ) for _, _, _, _, chunks, pred, succ in fragments])
        self.max_chunks = max((nc for nc, _ in self.kinds), default=0)
        self.max_segments = max(1, min(MAX_SEGMENTS, self.max_chunks // MIN_SEGMENT_CHUNKS))
        self._walks: dict[tuple[int, int, int], int] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankJobs) and self.kinds == other.kinds

    def __hash__(self) -> int:
        return hash(frozenset(self.kinds.items()))

    def num_segments(self, P: int) -> int:
        return sum(count * min(P, nc) for (nc, _), count in self.kinds.items())

    def walk(self, P: int, HV: int, sm_count: int) -> int:
        """Modelled cost of this rank at P segments a fragment, in chunk steps."""
        key = (P, HV, sm_count)
        if key not in self._walks:
            tape: Counter[int] = Counter()
            summary: Counter[int] = Counter()
            for (nc, crosses), count in self.kinds.items():
                jobs = count * HV
                p = max(1, min(P, nc))
                short, long = divmod(nc, p)
                for length, segments in ((short, p - long), (short + 1, long)):
                    tape[length] += segments * jobs
                    summary[length] += segments * jobs
                if not crosses:
                    # A document that stays on this rank needs no summary of its last segment: nothing follows it. The
                    # last of segment_lengths is the longest one.
                    summary[short + 1 if long else short] -= jobs
            tape_span = lpt_makespan(tape, sm_count)
            summary_span = tape_span if summary == tape else lpt_makespan(summary, sm_count)
            self._walks[key] = SUMMARY_WEIGHT * summary_span + TAPE_WEIGHT * tape_span
        return self._walks[key]


def segment_lengths(num_chunks: int, P: int) -> list[int]:
    """Chunks of each segment: the difference of consecutive floor(nc * i / p), p = min(P, nc) but at least 1."""
    p = max(1, min(P, num_chunks))
    if p == 1:
        return [num_chunks]
    return [num_chunks * (i + 1) // p - num_chunks * i // p for i in range(p)]


def lpt_makespan(jobs: Mapping[int, int], machines: int) -> int:
    """Largest load after greedy longest-first scheduling of `jobs` {size: count} on equal machines.

    Machines are a multiset {load: count}. All jobs of one size are placed at once: a bisection finds the highest level
    to which they fill the machines, and the rest each go to a machine standing exactly at that level. Equal to
    scheduling job by job, in time independent of the counts.
    """
    sizes = sorted((size for size, count in jobs.items() if size > 0 and count > 0), reverse=True)
    if not sizes:
        return 0
    rounds, left = divmod(jobs[sizes[0]], machines)
    loads = {sizes[0] * rounds: machines - left}
    if left:
        loads[sizes[0] * (rounds + 1)] = left
    for size in sizes[1:]:
        count = jobs[size]
        # no level above the mean load: reaching it takes at least (level - load) / size jobs on every machine
        low, high = min(loads), (size * count + sum(load * c for load, c in loads.items())) // machines
        while low < high:
            level = (low + high + 1) // 2
            if sum(c * -((load - level) // size) for load, c in loads.items() if load < level) <= count:
                low = level
            else:
                high = level - 1
        left = count - sum(c * -((load - low) // size) for load, c in loads.items() if load < low)
        filled: dict[int, int] = {}
        for load, c in loads.items():
            top = load + size * -((load - low) // size) if load < low else load
            extra = min(left, c) if top == low else 0
            left -= extra
            if extra:
                filled[top + size] = filled.get(top + size, 0) + extra
            if c > extra:
                filled[top] = filled.get(top, 0) + c - extra
        loads = filled
    return max(loads)


def _one(rank: RankJobs, HV: int, sm_count: int) -> int:
    return 1


def _occ(rank: RankJobs, HV: int, sm_count: int) -> int:
    """Smallest P that gives every multiprocessor a job."""
    options = range(1, rank.max_segments + 1)
    return next((P for P in options if HV * rank.num_segments(P) >= sm_count), rank.max_segments)


def _wave_fill1(rank: RankJobs, HV: int, sm_count: int) -> int:
    """Smallest P whose waves x longest segment is within 2 % of the least."""
    options = range(1, rank.max_segments + 1)
    cost = {P: -(-HV * rank.num_segments(P) // sm_count) * -(-rank.max_chunks // P) for P in options}
    bound = min(cost.values()) * 102
    return next(P for P in options if cost[P] * 100 <= bound)


PROGRAMS = {"one": _one, "occ": _occ, "wave_fill1": _wave_fill1}
P_RULES = (*PROGRAMS, *ROW_RULES)


def _row_cost(ranks: Sequence[RankJobs], HV: int, sm_count: int) -> list[int]:
    """The one program whose row of values has the least largest walk; P = 1 unless that gains 10 %."""
    rows = [[program(rank, HV, sm_count) for rank in ranks] for program in PROGRAMS.values()]
    walks = [_row_walk(ranks, row, HV, sm_count) for row in rows]
    best = walks.index(min(walks))
    return rows[0] if walks[best] * 100 > walks[0] * (100 - LEAVE_ONE_PERCENT) else rows[best]


def _row_cost_lpt(ranks: Sequence[RankJobs], HV: int, sm_count: int) -> list[int]:
    """row_cost, then a search over P for ranks with few long fragments, kept only if the slowest rank gains 4 %."""
    base = _row_cost(ranks, HV, sm_count)
    row = list(base)
    for i, rank in enumerate(ranks):
        if base[i] == 1 or not (1 <= rank.num_fragments <= LPT_MAX_FRAGMENTS and rank.max_chunks >= LPT_MIN_CHUNKS):
            continue
        walks = {P: rank.walk(P, HV, sm_count) for P in range(2, rank.max_segments + 1)}
        bound = min(walks.values()) * (100 + SEARCH_MARGIN_PERCENT)
        P = next(P for P in walks if walks[P] * 100 <= bound)
        if walks[P] <= rank.walk(base[i], HV, sm_count):
            row[i] = P
    before, after = _row_walk(ranks, base, HV, sm_count), _row_walk(ranks, row, HV, sm_count)
    return base if after * 100 > before * (100 - ROW_MARGIN_PERCENT) else row


def _row_walk(ranks: Sequence[RankJobs], row: Sequence[int], HV: int, sm_count: int) -> int:
    return max(rank.walk(P, HV, sm_count) for rank, P in zip(ranks, row, strict=True))


def kcp_plan_row(part: Partition, HV: int, *, sm_count: int, p_rule: str = "row_cost") -> list[int]:
    """P of every rank, from the fragment tables of all ranks, so that each rank computes the same row.

    Args:
        part: the partition of the pack.
        HV: value heads, at least 1.
        sm_count: multiprocessors of the (equal) devices.
        p_rule: "one", "occ", "wave_fill1", "row_cost" or "row_cost_lpt".

    Raises:
        TypeError: part is not a Partition, HV or sm_count not an int.
        ValueError: HV or sm_count below 1, an unknown rule.
    """
    _check_counts(part, HV, sm_count)
    if p_rule not in P_RULES:
        raise ValueError(f"p_rule: expected one of {', '.join(P_RULES)}, got {p_rule!r}")
    return list(_plan_row(part, HV, sm_count, p_rule))


@lru_cache(maxsize=16)
def _plan_row(part: Partition, HV: int, sm_count: int, p_rule: str) -> tuple[int, ...]:
    alike: dict[RankJobs, RankJobs] = {}  # ranks with equal jobs share one, and with it the walks worked out
    ranks = [alike.setdefault(jobs, jobs) for jobs in map(RankJobs, part.by_rank)]
    if p_rule == "row_cost":
        return tuple(_row_cost(ranks, HV, sm_count))
    if p_rule == "row_cost_lpt":
        return tuple(_row_cost_lpt(ranks, HV, sm_count))
    return tuple(PROGRAMS[p_rule](rank, HV, sm_count) for rank in ranks)


def kcp_plan(part: Partition, rank: int, HV: int, *, sm_count: int = H200_SM_COUNT, p_rule: str = "wave_fill1") -> int:
    """P of one rank from its own fragments alone. Row rules compare ranks and are refused here.

    Raises:
        TypeError: part is not a Partition, a count or the rank not an int.
        ValueError: a row rule (use `kcp_plan_row`), an unknown rule, a rank outside the partition, counts below 1.
    """
    _check_counts(part, HV, sm_count)
    if p_rule in ROW_RULES:
        raise ValueError(f"p_rule: {p_rule!r} compares all ranks; use kcp_plan_row, or one of {', '.join(PROGRAMS)}")
    if p_rule not in PROGRAMS:
        raise ValueError(f"p_rule: expected one of {', '.join(PROGRAMS)}, got {p_rule!r}")
    check_rank(rank, part)
    return PROGRAMS[p_rule](RankJobs(part.by_rank[rank]), HV, sm_count)


def _check_counts(part: object, HV: int, sm_count: int) -> None:
    check_partition(part)
    for name, value in (("HV", HV), ("sm_count", sm_count)):
        check_count(name, value)
