"""Modelled efficiency of context parallelism over 16 ranks by layout: 64 random packs of each of three kinds.

    python benchmarks/bench_kcp_efficiency.py [--world 16] [--plans 64] [--heads 6 48] [--view plan.png]

Nothing runs on a device: plans are made and their modelled cost is compared ("walk", GDN.md §5: 5 steps a chunk for
summaries, 3 for walks). Columns, means over the packs:

speedup     the one-rank plan's walk over the slowest rank's; the efficiency is that over the number of ranks
balance     mean over ranks of the walk, over the slowest rank's
crossing    fragments that hand a state to another rank, per pack
ring, a2a   MiB that the busiest rank sends in one forward exchange, K = V = 128

Writes benchmarks/results/kcp_efficiency_w16.csv; --view also draws the plan of a 7-document pack over two ranks.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

import kcp_packs

import ple_gdn
from ple_gdn.ops.kcp.exchange import exchanged_bytes
from ple_gdn.ops.kcp.partition import LAYOUTS, Partition
from ple_gdn.ops.kcp.plan import RankPlan
from ple_gdn.ops.kcp.planner import RankJobs

KINDS = {"one document": kcp_packs.one_document, "log-normal": kcp_packs.log_normal, "1000 short": kcp_packs.short}
RULE, SM_COUNT, WIDTH = "row_cost_lpt", 132, 128
RESULTS = Path(__file__).parent / "results"


def walks(part: Partition, HV: int) -> tuple[list[int], list[int]]:
    """(P, modelled walk) of every rank."""
    row = ple_gdn.kcp_plan_row(part, HV, sm_count=SM_COUNT, p_rule=RULE)
    cost = [RankJobs(rank).walk(P, HV, SM_COUNT) for rank, P in zip(part.by_rank, row, strict=True)]
    return row, cost


def measure(bounds: list[int], world: int, layout: str, HV: int) -> dict[str, float]:
    part = ple_gdn.kcp_partition(bounds, world, layout)
    row, cost = walks(part, HV)
    alone = walks(ple_gdn.kcp_partition(bounds, 1), HV)[1][0]
    plans = [RankPlan(rank, world, len(bounds) - 1, tuple(row), part.fragments) for rank in range(world)]
    sent = {
        how: max(exchanged_bytes(plan, HV, WIDTH, WIDTH, how) for plan in plans) / 2**20
        for how in ("ring", "all_to_all")
    }
    return {
        "speedup": alone / max(cost),
        "efficiency": alone / max(cost) / world,
        "balance": statistics.fmean(cost) / max(cost),
        "crossing": sum(f.has_succ for f in part.fragments),
        "ring_mib": sent["ring"],
        "a2a_mib": sent["all_to_all"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=16)
    parser.add_argument("--plans", type=int, default=64)
    parser.add_argument("--heads", type=int, nargs="+", default=[6, 48], help="value heads")
    parser.add_argument("--view", type=Path)
    given = parser.parse_args()
    rows = []
    for HV in given.heads:
        for kind, draw in KINDS.items():
            packs = [draw(seed) for seed in range(given.plans)]
            for layout in LAYOUTS:
                found = [measure(bounds, given.world, layout, HV) for bounds in packs]
                means = {name: round(statistics.fmean(f[name] for f in found), 3) for name in found[0]}
                least = round(min(f["efficiency"] for f in found), 3)
                head = {"HV": HV, "pack": kind, "layout": layout, "world": given.world, "plans": given.plans}
                rows.append(head | means | {"least_efficiency": least})
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    with (RESULTS / f"kcp_efficiency_w{given.world}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if given.view:
        part = ple_gdn.kcp_partition(kcp_packs.SEVEN, 2, "contiguous")
        ple_gdn.kcp_plan_view(part, given.heads[-1]).save(given.view)


if __name__ == "__main__":
    main()
