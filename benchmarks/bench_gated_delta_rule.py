"""Gated delta rule on one GPU: forward and backward times, per-kernel times, peak memory, against byte and FLOP floors.

    python benchmarks/bench_gated_delta_rule.py [--l2norm] [--save-mode full] [--out results.json]

Floors (design: one read of each input, one write of each output, tensor-core products once): with H, HV heads, widths
K, V and chunk C = 64, per token forward bytes 4HK + HV(4V + 8), FLOPs HV(6KV + 4CV + 2/3 C^2) + 4HCK; backward bytes
8HK + HV(6V + 16), FLOPs HV(16KV + 10CV + 8CK) + 2HCK with h and delta replayed. Ceilings measured on an H200:
4.25 TB/s and 716 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import platform
from itertools import accumulate
from pathlib import Path

import torch

import ple_gdn

CHUNK = 64
BYTES_PER_MS = 4.25e9
FLOPS_PER_MS = 716e9
PACK = (40961, 3000, 65000, 17, 9000, 120000, 24009)
SHAPES = (
    ("1x8192 (16,48)", 1, 8192, 16, 48, None),
    ("1x32768 (16,48)", 1, 32768, 16, 48, None),
    ("8x4096 (16,48)", 8, 4096, 16, 48, None),
    ("pack 261987 (2,6)", 1, sum(PACK), 2, 6, PACK),
)


def floors(tokens: int, H: int, HV: int, K: int, V: int) -> tuple[float, float]:
    """Least milliseconds of the forward and of the backward: the larger of bytes and FLOPs over their ceilings."""
    forward = 4 * H * K + HV * (4 * V + 8), HV * (6 * K * V + 4 * CHUNK * V + 2 / 3 * CHUNK**2) + 4 * H * CHUNK * K
    backward = (
        8 * H * K + HV * (6 * V + 16),
        HV * (16 * K * V + 10 * CHUNK * V + 8 * CHUNK * K) + 2 * H * CHUNK * K,
    )
    return tuple(tokens * max(size / BYTES_PER_MS, flops / FLOPS_PER_MS) for size, flops in (forward, backward))


def median_ms(call: object, repeats: int) -> float:
    """Median device time; launches are queued back to back, so host time counts only where the device waits for it."""
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def kernel_ms(call: object) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {e.key: round(e.device_time_total / 1e3, 4) for e in profile.key_averages() if e.device_time_total > 1}


def measure(name: str, B: int, T: int, H: int, HV: int, pack: tuple[int, ...] | None, args: argparse.Namespace) -> dict:
    K = V = 128
    torch.manual_seed(0)
    unit = lambda: torch.nn.functional.normalize(torch.randn(B, T, H, K, device="cuda"), dim=-1)  # noqa: E731
    q, k = unit().bfloat16().requires_grad_(), unit().bfloat16().requires_grad_()
    v = torch.randn(B, T, HV, V, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn_like(v)
    g = (torch.nn.functional.logsigmoid(torch.randn(B, T, HV, device="cuda")) / 4).requires_grad_()
    beta = torch.sigmoid(torch.randn(B, T, HV, device="cuda")).requires_grad_()
    packing = None if pack is None else ple_gdn.prepare_varlen(torch.tensor((0, *accumulate(pack)), device="cuda"))

    def forward() -> torch.Tensor:
        return ple_gdn.gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm=args.l2norm, save_mode=args.save_mode, cu_seqlens=packing
        )[0]

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v, g, beta), do)

    row = {"shape": name, "forward": median_ms(forward, args.repeats), "both": median_ms(both, args.repeats)}
    torch.cuda.reset_peak_memory_stats()
    both()
    row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    row["floor_forward"], row["floor_backward"] = floors(B * T, H, HV, K, V)
    row["kernels"] = kernel_ms(both)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--l2norm", action="store_true")
    parser.add_argument("--save-mode", choices=("light", "full"), default="light")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measure(*shape, args) for shape in SHAPES]
    print(f"{'shape':20s} {'fwd ms':>8s} {'floor':>7s} {'fwd+bwd':>8s} {'floor':>7s} {'peak MiB':>9s}")
    for row in rows:
        total = row["floor_forward"] + row["floor_backward"]
        print(
            f"{row['shape']:20s} {row['forward']:8.3f} {row['floor_forward']:7.3f} {row['both']:8.3f} {total:7.3f} "
            f"{row['peak_mib']:9.0f}  " + "  ".join(f"{key} {value}" for key, value in row["kernels"].items())
        )
    if args.out:
        import triton

        versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
        options = {"l2norm": args.l2norm, "save_mode": args.save_mode}
        record = {"device": torch.cuda.get_device_name(), "versions": versions, "options": options, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
