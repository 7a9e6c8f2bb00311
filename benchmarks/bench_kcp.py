"""Forward and backward of the gated delta rule over two GPUs against one, (16, 48) heads, K = V = 128, bf16.

    python benchmarks/bench_kcp.py [--repeats 10]                                   # about 2 minutes on two H200
    python benchmarks/bench_kcp.py --device cpu --divisor 1024 --heads 1 2 --width 16 --repeats 1   # its logic, gloo

Packs: seven documents, and one of 262,144 tokens. Every layout, P by rule and fixed, ring and all-to-all. First each is
checked: output and gradients against one GPU, ring = all-to-all bit for bit. Then they take turns with the plain op on
the whole pack; the two processes start together behind a barrier, the slower one counts. Bar, exit status 1 if missed:
1.85 at the best layout for the seven documents; the model says about 1.45 for the one document. NVLink multicast stays
off (NCCL_NVLS_ENABLE=0). On GPUs writes benchmarks/results/kcp_h200.json, after each pack.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import kcp_packs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import RESULTS, versions

import ple_gdn
from ple_gdn.ops.kcp.partition import LAYOUTS

PACKS = {"7 documents": kcp_packs.SEVEN, "1 document": [0, kcp_packs.TOKENS]}
RULES = ("row_cost_lpt", 1, 2)
EXCHANGES = ("ring", "all_to_all")
WORLD, BAR = 2, 1.85
BUDGET = {"cuda": 8e-3, "cpu": 1e-5}  # bf16 against bf16, fp32 against fp32: relative RMS, both sides round
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")

Tensor = torch.Tensor


def inputs(tokens: int, given: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """q, k, v, g, beta and the gradient of o; equal on every rank."""
    torch.manual_seed(0)
    H, HV = given.heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(1, tokens, n, given.width) for n in (H, H, HV, HV)]
    q, k, v, do = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    g = torch.nn.functional.logsigmoid(torch.randn(1, tokens, HV, device=device)) / 16
    return [*(t.requires_grad_() for t in (q, k, v, g, torch.sigmoid(g).detach())), do]


def shard(whole: list[Tensor], ctx: ple_gdn.KcpContext) -> list[Tensor]:
    *leaves, do = (t.detach().index_select(1, ctx.positions) for t in whole)
    return [*(t.requires_grad_() for t in leaves), do]


def step(tensors: list[Tensor], **where: object) -> list[Tensor]:
    *leaves, do = tensors
    o, _ = ple_gdn.gated_delta_rule(*leaves, use_qk_l2norm=True, **where)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def of_the_slower(value: float, device: torch.device) -> float:
    largest = torch.tensor([value], device=device, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Of the slower rank; all start together. On the CPU seconds of the process, of no meaning but that it ran."""
    if device.type == "cpu":
        start = time.process_time()
        call()
        return of_the_slower(1e3 * (time.process_time() - start), device)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(8_000_000)  # 4 ms: the queue waits while the host enqueues
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return of_the_slower(start.elapsed_time(stop), device)


def errors(got: list[Tensor], reference: list[Tensor], ctx: ple_gdn.KcpContext) -> dict[str, float]:
    """Relative RMS of this rank's part, the worse of the ranks."""
    out = {}
    for name, value, whole in zip(NAMES, got, reference, strict=True):
        expected = whole.index_select(1, ctx.positions).float()
        error = (value.float() - expected).norm() / expected.norm().clamp_min(1e-30)
        out[name] = of_the_slower(float(error), value.device)
    return out


def measure(rank: int, bounds: list[int], given: argparse.Namespace, device: torch.device) -> list[dict]:
    """One row per (layout, rule, exchange): its errors against one GPU, whether its bits are the ring's, median ms."""
    whole = inputs(bounds[-1], given, device)
    packing = ple_gdn.prepare_varlen(torch.tensor(bounds, device=device))
    reference = step(whole, cu_seqlens=packing)
    rows, calls = [], {("one GPU",): lambda: step(whole, cu_seqlens=packing)}
    for layout in LAYOUTS:
        part, mine = ple_gdn.kcp_partition(bounds, WORLD, layout), None
        for rule in RULES:
            ring = None
            for exchange in EXCHANGES:
                options = {"p_rule": rule, "exchange": exchange}
                ctx = ple_gdn.build_kcp_context(part, dist.group.WORLD, rank, device, **options).prepare(*given.heads)
                mine = shard(whole, ctx) if mine is None else mine
                calls[layout, str(rule), exchange] = lambda mine=mine, ctx=ctx: step(mine, cp=ctx)
                got = calls[layout, str(rule), exchange]()
                ring = got if ring is None else ring
                differs = not all(torch.equal(a, b) for a, b in zip(got, ring, strict=True))
                row = {"layout": layout, "P": str(rule), "exchange": exchange, "errors": errors(got, reference, ctx)}
                rows.append(row | {"same_bits_as_ring": not of_the_slower(differs, device)})
            del ring, got
    del reference
    times: dict[tuple, list[float]] = {key: [] for key in calls}
    for repeat in range(given.repeats + 1):
        for key, call in calls.items():
            elapsed = milliseconds(call, device)
            if repeat:
                times[key].append(elapsed)
    medians = {key: statistics.median(values) for key, values in times.items()}
    alone = medians["one GPU",]
    for row in rows:
        ms = medians[row["layout"], row["P"], row["exchange"]]
        row |= {"one_gpu_ms": alone, "two_gpus_ms": ms, "speedup": alone / ms}
    return rows


def verdicts(packs: dict[str, list[dict]], device: str) -> dict[str, tuple[bool | None, str]]:
    """Claim -> (holds, figure); None: reported only."""
    every = [row for rows in packs.values() for row in rows]
    worst = max(error for row in every for error in row["errors"].values())
    out = {
        f"equal to one GPU within {BUDGET[device]}": (worst <= BUDGET[device], f"worst {worst:.1e}"),
        "ring = all-to-all bitwise": (all(row["same_bits_as_ring"] for row in every), f"{len(every)} runs"),
    }
    for name, rows in packs.items():
        best = max(rows, key=lambda row: row["speedup"])
        figure = f"{best['speedup']:.3f} ({best['layout']}, P {best['P']}, {best['exchange']})"
        bar = f">= {BAR}" if name == "7 documents" else "about 1.45 by the model"
        holds = best["speedup"] >= BAR if name == "7 documents" and device == "cuda" else None
        out[f"{name}: speedup {bar}"] = (holds, figure)
    return out


def table(packs: dict[str, list[dict]], device: str) -> str:
    lines = []
    for name, rows in packs.items():
        lines.append(f"{name}, one GPU {rows[0]['one_gpu_ms']:.2f} ms; two GPUs, ms (speedup)")
        lines.append(f"  {'layout':20s} {'P':>12s}" + "".join(f" {exchange:>16s}" for exchange in EXCHANGES))
        for (layout, rule), pair in itertools.groupby(rows, key=lambda row: (row["layout"], row["P"])):
            cells = "".join(f" {row['two_gpus_ms']:8.2f} ({row['speedup']:.3f})" for row in pair)
            lines.append(f"  {layout:20s} {rule:>12s}{cells}")
    mark = {True: "holds", False: "FAILS", None: "reported"}
    lines += [f"{mark[holds]:9s} {claim}: {figure}" for claim, (holds, figure) in verdicts(packs, device).items()]
    return "\n".join(lines)


def worker(rank: int, port: int, given: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    on_gpu = given.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    options = {"timeout": timedelta(seconds=120)}
    if on_gpu:
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=WORLD, **options)
    about = versions() if on_gpu else {"torch": torch.__version__}
    packs: dict[str, list[dict]] = {}
    for name, bounds in PACKS.items():
        packs[name] = measure(rank, [b // given.divisor for b in bounds], given, device)
        if rank == 0 and given.out is not None:
            claims = {claim: list(found) for claim, found in verdicts(packs, given.device).items()}
            record = {**about, "heads": given.heads, "width": given.width, "repeats": given.repeats}
            given.out.write_text(json.dumps({**record, "verdicts": claims, "packs": packs}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(table(packs, given.device), flush=True)
        failed = any(holds is False for holds, _ in verdicts(packs, given.device).values())
        sys.exit(int(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--divisor", type=int, default=1, help="of every boundary of the packs")
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 48))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results on GPUs, nowhere on the CPU")
    given = parser.parse_args()
    if given.device == "cuda" and torch.cuda.device_count() < WORLD:
        print("needs two CUDA devices: nothing measured")
        return 2
    if given.out is None and given.device == "cuda":
        given.out = RESULTS / "kcp_h200.json"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    try:
        mp.spawn(worker, (port, given), nprocs=WORLD)
    except mp.ProcessExitedException as ended:
        return ended.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
