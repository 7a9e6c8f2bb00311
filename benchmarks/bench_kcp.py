"""Forward and backward of the gated delta rule over two GPUs against one, (16, 48) heads, K = V = 128, bf16.

    python benchmarks/bench_kcp.py [--repeats 15]

Packs: seven documents, and one of 262,144 tokens. Every layout, P by rule and fixed, ring and all-to-all; the two
processes start together behind a barrier, the slower one counts. One GPU runs the plain op on the whole pack. Peers
and packs take turns. Bar: 1.85 at the best layout for the seven documents; the model says about 1.45 for the one
document. NVLink multicast stays off (NCCL_NVLS_ENABLE=0). Writes benchmarks/results/kcp_h200.csv.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
from datetime import timedelta

import kcp_packs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import write_csv

import ple_gdn
from ple_gdn.ops.kcp.partition import LAYOUTS

H, HV, WIDTH = 16, 48, 128
PACKS = {"7 documents": kcp_packs.SEVEN, "1 document": [0, kcp_packs.TOKENS]}
RULES = ("row_cost_lpt", 1, 2)
EXCHANGES = ("ring", "all_to_all")


def inputs(tokens: int, device: torch.device) -> list[torch.Tensor]:
    shapes = [(1, tokens, n, WIDTH) for n in (H, H, HV, HV)]
    q, k, v, do = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    g = torch.nn.functional.logsigmoid(torch.randn(1, tokens, HV, device=device)) / 16
    return [*(t.requires_grad_() for t in (q, k, v, g, torch.sigmoid(g).detach())), do]


def step(tensors: list[torch.Tensor], **where: object) -> None:
    *leaves, do = tensors
    o, _ = ple_gdn.gated_delta_rule(*leaves, use_qk_l2norm=True, **where)
    torch.autograd.grad(o, leaves, do)


def milliseconds(call, group) -> float:
    """Of the slower rank; all start together."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier(group)
    torch.cuda._sleep(4_000_000)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    slowest = torch.tensor([start.elapsed_time(stop)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest)


def measure(rank: int, bounds: list[int], repeats: int, device: torch.device) -> dict[tuple, float]:
    """Median milliseconds per (layout, rule, exchange); the key ("one GPU",) is the plain op, run on both."""
    group, calls = dist.group.WORLD, {}
    whole = inputs(bounds[-1], device)
    packing = ple_gdn.prepare_varlen(torch.tensor(bounds, device=device))
    calls["one GPU",] = lambda: step(whole, cu_seqlens=packing)
    shards: dict[int, list[torch.Tensor]] = {}
    for layout, rule, exchange in itertools.product(LAYOUTS, RULES, EXCHANGES):
        part = ple_gdn.kcp_partition(bounds, 2, layout)
        ctx = ple_gdn.build_kcp_context(part, group, rank, device, p_rule=rule, exchange=exchange).prepare(H, HV)
        mine = shards.setdefault(ctx.local_tokens, inputs(ctx.local_tokens, device))
        calls[layout, str(rule), exchange] = lambda mine=mine, ctx=ctx: step(mine, cp=ctx)
    times: dict[tuple, list[float]] = {key: [] for key in calls}
    for repeat in range(repeats + 2):
        for key, call in calls.items():
            elapsed = milliseconds(call, group)
            if repeat >= 2:
                times[key].append(elapsed)
    return {key: statistics.median(values) for key, values in times.items()}


def worker(rank: int, port: int, repeats: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=2, timeout=timedelta(seconds=300), device_id=device)
    rows = []
    for name, bounds in PACKS.items():
        found = measure(rank, bounds, repeats, device)
        alone = found.pop(("one GPU",))
        for (layout, rule, exchange), ms in found.items():
            row = {"pack": name, "layout": layout, "P": rule, "exchange": exchange, "one_gpu_ms": round(alone, 3)}
            rows.append(row | {"two_gpus_ms": round(ms, 3), "speedup": round(alone / ms, 3)})
            if rank == 0:
                print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    if rank == 0:
        print(f"written to {write_csv('kcp_h200', rows)}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("needs two CUDA devices: nothing measured")
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, (port, given.repeats), nprocs=2)


if __name__ == "__main__":
    main()
