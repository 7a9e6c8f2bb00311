"""Host time of partition, context and tables, cold, heads (16, 48), on the CPU; and of a warm rebuild.

    OMP_NUM_THREADS=1 nice -n -12 python benchmarks/bench_kcp_plan.py [--repeats 21]

Cold: every cache of the package is emptied before each repeat (the process and torch are warm, as in a training run).
CPU seconds of this thread, median; `first` is the first repeat. Bars: 7 documents 5 ms on one rank, 10 ms on eight;
1,000 documents on eight ranks with per-document zigzag 60 ms. Writes benchmarks/results/kcp_plan_host.csv.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import kcp_packs
import torch

import ple_gdn
from ple_gdn.ops.kcp import partition, plan, planner

HEADS = (16, 48)
RESULT = Path(__file__).parent / "results" / "kcp_plan_host.csv"
CASES = [("7 documents", kcp_packs.SEVEN, 1, 5.0), ("7 documents", kcp_packs.SEVEN, 8, 10.0)]
CASES += [("1000 documents", kcp_packs.short(0), 8, 60.0)]


class Group:
    """Stands for a process group: planning asks for its size and name only."""

    group_name = "none"

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def forget() -> None:
    planner._plan_row.cache_clear()
    partition._partition.cache_clear()
    plan._PARSED.clear()


def build(cu_seqlens: torch.Tensor, world: int, layout: str) -> ple_gdn.KcpContext:
    part = ple_gdn.kcp_partition(cu_seqlens, world, layout)
    group = Group(world) if world > 1 else None
    return ple_gdn.build_kcp_context(part, group, world // 2, "cpu").prepare(*HEADS)


def milliseconds(call: Callable[[], object], repeats: int, before: Callable[[], None]) -> list[float]:
    out = []
    for _ in range(repeats):
        before()
        start = time.thread_time()
        call()
        out.append(1e3 * (time.thread_time() - start))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    rows = []
    for name, bounds, world, bar in CASES:
        for layout in partition.LAYOUTS:
            cu_seqlens = torch.tensor(bounds)
            cold = milliseconds(lambda c=cu_seqlens, w=world, x=layout: build(c, w, x), repeats, forget)
            warm = milliseconds(lambda c=cu_seqlens, w=world, x=layout: build(c, w, x), repeats, lambda: None)
            bar_here = bar if name != "1000 documents" or layout == "zigzag_per_document" else ""
            row = {"pack": name, "world": world, "layout": layout, "cold_ms": round(statistics.median(cold), 2)}
            row |= {"first_ms": round(cold[0], 2), "worst_ms": round(max(cold), 2)}
            row |= {"warm_ms": round(statistics.median(warm), 2), "bar_ms": bar_here}
            rows.append(row | {"python": platform.python_version(), "torch": torch.__version__})
            print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    with RESULT.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
