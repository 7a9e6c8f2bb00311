"""A plan to look at: which multiprocessor runs which segment when, under the model the planner reckons with.

The model (GDN.md §5): a rank first runs its summary jobs, 5 time units a chunk, then its tape jobs, 3 units a chunk,
one job per segment and value head, longest first onto the least loaded multiprocessor. The times are modelled chunk
steps, not seconds.
"""

from __future__ import annotations

import heapq
import os
from dataclasses import dataclass
from typing import NamedTuple

from .partition import Fragment, Partition, check_count, check_partition, check_rank
from .planner import H200_SM_COUNT, SUMMARY_WEIGHT, TAPE_WEIGHT, kcp_plan_row, segment_lengths

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Bar(NamedTuple):
    """One job: `fragment` and `segment` count within the rank; times in modelled chunk steps."""

    phase: str  # "summary" or "tape"
    fragment: int
    segment: int
    head: int
    start: int
    end: int


@dataclass(frozen=True)
class RankView:
    """One rank's schedule: `lanes[m]` are the jobs of multiprocessor m in time order."""

    rank: int
    P: int
    fragments: tuple[Fragment, ...]
    lanes: tuple[tuple[Bar, ...], ...]
    summary_end: int  # when the last summary ends and the walks begin
    makespan: int


@dataclass(frozen=True)
class PlanView:
    """Schedules of some ranks of one plan. `str(view)` is a Gantt chart in text, `save(path)` one as an image."""

    part: Partition
    HV: int
    sm_count: int
    p_rule: str
    row: tuple[int, ...]
    ranks: tuple[RankView, ...]
    makespan: int  # of the slowest shown rank

    def text(self, width: int = 96) -> str:
        """Gantt chart `width` columns wide; multiprocessors that draw alike share a line; a legend of fragments."""
        check_count("width", width)
        part = self.part
        lines = [
            f"{part.total_tokens} tokens, {len(part.cu_seqlens) - 1} documents, {part.world_size} ranks, "
            f"{part.layout}; HV {self.HV}, {self.sm_count} multiprocessors, {self.p_rule}: P {list(self.row)}",
            f"modelled makespan {self.makespan} steps; one column is {self.makespan / width:.4g} steps; "
            "summaries in lower case and walks in upper case of the fragment's letter, '|' opens a segment, '.' idle",
        ]
        for rank in self.ranks:
            lines.append(
                f"rank {rank.rank}: P {rank.P}, {len(rank.fragments)} fragments, summaries until {rank.summary_end}, "
                f"walks until {rank.makespan}, busy {_busy(rank):.0%}"
            )
            drawn: dict[str, list[int]] = {}
            for machine, lane in enumerate(rank.lanes):
                drawn.setdefault(_draw(lane, self.makespan, width), []).append(machine)
            lines += [f"  {_runs(machines):>12} {row}" for row, machines in drawn.items()]
            for index, f in enumerate(rank.fragments[: len(LETTERS)]):
                lines.append(
                    f"  {_letter(index)}: document {f.document} [{f.start}, {f.end}), {f.num_chunks} chunks"
                    + (", enters from another rank" if f.has_pred else "")
                    + (", leaves to another rank" if f.has_succ else "")
                )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the chart as an image (PNG, SVG or PDF by the name's ending); needs matplotlib.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 1 + 3 * len(self.ranks)))
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(self.ranks), 1, sharex=True, squeeze=False)[:, 0]
        for rank, axis in zip(self.ranks, axes, strict=True):
            for machine, lane in enumerate(rank.lanes):
                for bar in lane:
                    axis.barh(
                        machine, bar.end - bar.start, left=bar.start, height=1.0, edgecolor="white", linewidth=0.2,
                        color=f"C{bar.fragment % 10}", alpha=0.45 if bar.phase == "summary" else 1.0,
                    )  # fmt: skip
            axis.axvline(rank.summary_end, color="black", linewidth=0.8)
            axis.set(ylabel="multiprocessor", xlim=(0, max(1, self.makespan)), ylim=(-0.5, self.sm_count - 0.5))
            axis.set_title(f"rank {rank.rank}: P {rank.P}, {rank.makespan} steps, busy {_busy(rank):.0%}", fontsize=9)
        axes[-1].set_xlabel("modelled chunk steps (pale: summaries; full: walks; one colour per fragment)")
        figure.suptitle(f"{self.part.layout}, {self.part.world_size} ranks, HV {self.HV}, {self.p_rule}", fontsize=10)
        figure.tight_layout()
        figure.savefig(path, dpi=110)


def kcp_plan_view(
    part: Partition,
    HV: int,
    *,
    rank: int | None = None,
    sm_count: int = H200_SM_COUNT,
    p_rule: str = "row_cost_lpt",
) -> PlanView:
    """Schedule of one rank, or of all, under the planner's model; its makespan is the cost the planner compares.

    Args:
        part: from `kcp_partition`.
        HV: value heads.
        rank: the rank to show; None for all.
        sm_count, p_rule: as in `kcp_plan_row`.

    Raises:
        TypeError, ValueError: what `kcp_plan_row` refuses; a rank outside the partition.
    """
    check_partition(part)
    row = kcp_plan_row(part, HV, sm_count=sm_count, p_rule=p_rule)
    if rank is not None:
        check_rank(rank, part)
    shown = range(part.world_size) if rank is None else (rank,)
    ranks = tuple(_rank_view(r, row[r], part.by_rank[r], HV, sm_count) for r in shown)
    return PlanView(part, HV, sm_count, p_rule, tuple(row), ranks, max(view.makespan for view in ranks))


def _rank_view(rank: int, P: int, fragments: tuple[Fragment, ...], HV: int, sm_count: int) -> RankView:
    tape, summary = [], []
    for index, f in enumerate(fragments):
        lengths = segment_lengths(f.num_chunks, P)
        jobs = [(chunks, index, segment) for segment, chunks in enumerate(lengths)]
        tape += jobs
        summary += jobs if f.has_pred or f.has_succ else jobs[:-1]
    lanes: list[list[Bar]] = [[] for _ in range(sm_count)]
    middle = _schedule("summary", summary, HV, SUMMARY_WEIGHT, 0, lanes)
    end = _schedule("tape", tape, HV, TAPE_WEIGHT, middle, lanes)
    return RankView(rank, P, fragments, tuple(map(tuple, lanes)), middle, end)


def _schedule(
    phase: str, jobs: list[tuple[int, int, int]], HV: int, weight: int, begin: int, lanes: list[list[Bar]]
) -> int:
    """Places HV copies of every job, longest first, each on the least loaded lane; returns the last end."""
    heap = [(begin, machine) for machine in range(len(lanes))]
    for chunks, fragment, segment in sorted(jobs, key=lambda job: (-job[0], job[1], job[2])):
        for head in range(HV):
            start, machine = heap[0]
            stop = start + weight * chunks
            lanes[machine].append(Bar(phase, fragment, segment, head, start, stop))
            heapq.heapreplace(heap, (stop, machine))
    return max(load for load, _ in heap)


def _busy(rank: RankView) -> float:
    work = sum(bar.end - bar.start for lane in rank.lanes for bar in lane)
    return work / max(1, rank.makespan * len(rank.lanes))


def _letter(fragment: int) -> str:
    return LETTERS[fragment % len(LETTERS)]


def _draw(lane: tuple[Bar, ...], makespan: int, width: int) -> str:
    cells = ["."] * width
    for bar in lane:
        first, last = bar.start * width // max(1, makespan), bar.end * width // max(1, makespan)
        letter = _letter(bar.fragment)
        cells[first : max(last, first + 1)] = [letter.lower() if bar.phase == "summary" else letter] * max(
            1, last - first
        )
        if last > first + 1:
            cells[first] = "|"
    return "".join(cells)


def _runs(machines: list[int]) -> str:
    """As in 0-47,50: multiprocessor numbers, runs joined, cut off after three runs."""
    runs: list[list[int]] = []
    for m in machines:
        if runs and m == runs[-1][1] + 1:
            runs[-1][1] = m
        else:
            runs.append([m, m])
    shown = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:3])
    return shown + (",..." if len(runs) > 3 else "")
