"""What a compile did, as a value and as a table: `Report`, and the reports of the graphs compiled last."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .fx_passes.records import PassFailure, Records, Refusal, Rewrite, TapeDecision

# Enough for every layer of the largest models compiled layer by layer.
REPORTS_KEPT = 512


@dataclass(frozen=True)
class Report:
    """Decisions of one or more compiled graphs; `print(report)` is a table.

    rewrites, refusals, tapes, failures, fallbacks: see `ple_gdn.fx_passes.records`.
    graphs: how many graphs Dynamo made. graph_breaks: the reason of each break between them.
    """

    rewrites: tuple[Rewrite, ...]
    refusals: tuple[Refusal, ...]
    tapes: tuple[TapeDecision, ...]
    failures: tuple[PassFailure, ...]
    fallbacks: tuple[str, ...]
    graphs: int
    graph_breaks: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.graphs} graph(s), {len(self.graph_breaks)} graph break(s)"]
        lines += [f"  break: {reason}" for reason in self.graph_breaks]
        lines += _section("rewrites", ("pass", "op", "where", "detail"), [_row(r) for r in self.rewrites])
        lines += _section("refusals", ("pass", "where", "reason"), [_row(r) for r in self.refusals])
        header = ("region", "verdict", "reason", "bytes at stake", "replay cost")
        lines += _section("tapes", header, [_row(t) for t in self.tapes])
        lines += _section("failures", ("pass", "error"), [_row(f) for f in self.failures])
        lines += _section("fallbacks", ("what",), [(f,) for f in self.fallbacks])
        return "\n".join(lines)


def merge_reports(reports: Iterable[Report]) -> Report:
    """One report over several graphs, in their order."""
    reports = list(reports)
    lists = ("rewrites", "refusals", "tapes", "failures", "fallbacks", "graph_breaks")
    merged = {name: tuple(entry for report in reports for entry in getattr(report, name)) for name in lists}
    return Report(graphs=sum(report.graphs for report in reports), **merged)


def make_report(gm: torch.fx.GraphModule, records: Records) -> Report:
    """The report of one Dynamo graph."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    broke = reason is not None and getattr(reason, "graph_break", False)
    entries = {name: tuple(value) for name, value in vars(records).items()}
    return Report(graphs=1, graph_breaks=(_first_line(reason.reason),) if broke else (), **entries)


_kept: deque[Report] = deque(maxlen=REPORTS_KEPT)
_lock = threading.Lock()


def remember(gm: torch.fx.GraphModule, records: Records) -> None:
    """Keeps the report of a graph that was just compiled."""
    with _lock:
        _kept.append(make_report(gm, records))


def compile_reports() -> list[Report]:
    """One report for each graph this process compiled through the backend, oldest first (the last 512).

    A graph found in Inductor's cache was not rewritten again after autograd: its report has no joint-graph entries,
    while `ple_gdn.explain` always traces afresh.
    """
    with _lock:
        return list(_kept)


def last_report() -> Report | None:
    """The report of the graph compiled last, or None."""
    with _lock:
        return _kept[-1] if _kept else None


def _row(record: object) -> tuple[str, ...]:
    return tuple(str(value) for value in vars(record).values())


def _first_line(text: object) -> str:
    return str(text).strip().splitlines()[0] if str(text).strip() else "unknown"


def _section(title: str, header: Sequence[str], rows: list[tuple[str, ...]]) -> list[str]:
    """A titled table; equal rows stand once, with their count in front."""
    if not rows:
        return [f"{title}: none"]
    counted = [(str(count), *row) for row, count in Counter(rows).items()]
    table = [("count", *header), *counted]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return [f"{title}: {len(rows)}", *(line.rstrip() for line in lines)]
