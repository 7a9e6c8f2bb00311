"""Short causal convolution with SiLU on a GPU: milliseconds against the byte floor, and against eager `F.conv1d`.

    python benchmarks/bench_causal_conv1d.py [--out results.json]

D = 2 H K + HV V of the Gated DeltaNet layer: 10240 at (16, 48) heads, 1280 at (2, 6); 4 taps, bf16. Floor: the forward
reads x and writes y, the backward reads dy and x and writes dx, at 4.15 TB/s. Times are medians of device time with a
cold L2; `kernels` are the parts of forward and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from common import H200_BYTES_PER_S, time_once, versions
from torch import Tensor

import ple_gdn

PACK = (40961, 3000, 65000, 17, 9000, 120000, 24009)
SHAPES = (
    ("1x8192x10240", 8192, 10240, None),
    ("1x32768x10240", 32768, 10240, None),
    ("32768x10240 in 8 documents", 32768, 10240, (4096,) * 8),
    ("32768x10240 in 512 documents", 32768, 10240, (64,) * 512),
    ("261987x1280 in 7 documents", sum(PACK), 1280, PACK),
)


def floors(tokens: int, width: int) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward at copy bandwidth, 2 bytes an element."""
    return tuple(streams * 2 * tokens * width / H200_BYTES_PER_S * 1e3 for streams in (2, 3))


def eager(x: Tensor, weight: Tensor) -> Tensor:
    """What transformers runs without a kernel library; one document."""
    out = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), padding=weight.shape[1] - 1, groups=x.shape[2])
    return F.silu(out[:, :, : x.shape[1]]).transpose(1, 2)


def median_ms(call: object, repeats: int) -> float:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    return statistics.median(time_once(call, flush) for _ in range(repeats))


def kernel_ms(call: object) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {e.key: round(e.device_time_total / 1e3, 4) for e in profile.key_averages() if e.device_time_total > 2}


def measure(name: str, tokens: int, width: int, lengths: tuple[int, ...] | None, repeats: int) -> dict[str, object]:
    torch.manual_seed(0)
    x = torch.randn(1, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(width, 4, device="cuda", dtype=torch.bfloat16) / 2).requires_grad_()
    dy = torch.randn_like(x)
    packing = None
    if lengths is not None:
        packing = ple_gdn.prepare_varlen(torch.tensor((0, *accumulate(lengths)), device="cuda"))

    def forward() -> Tensor:
        return ple_gdn.causal_conv1d(x, weight, activation="silu", cu_seqlens=packing)

    boundaries = None if packing is None else packing.cu_seqlens
    backward = lambda: torch.ops.ple_gdn.causal_conv1d_backward(  # noqa: E731
        dy, x.detach(), weight.detach(), None, boundaries, activation="silu"
    )
    row = {"shape": name, "forward": median_ms(forward, repeats), "backward": median_ms(backward, repeats)}
    row["floor_forward"], row["floor_backward"] = floors(tokens, width)
    row["kernels"] = {**kernel_ms(forward), **kernel_ms(backward)}
    if lengths is None:
        row["eager_forward"] = median_ms(lambda: eager(x, weight), repeats)
        both = lambda: torch.autograd.grad(eager(x, weight), (x, weight), dy)  # noqa: E731
        row["eager_both"] = median_ms(both, repeats)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measure(*shape, args.repeats) for shape in SHAPES]
    print(f"{'shape':30s} {'fwd ms':>8s} {'x floor':>8s} {'bwd ms':>8s} {'x floor':>8s}  eager fwd, fwd+bwd; kernels")
    for row in rows:
        ratios = row["forward"] / row["floor_forward"], row["backward"] / row["floor_backward"]
        peer = f"{row['eager_forward']:.3f}, {row['eager_both']:.3f}" if "eager_both" in row else "-"
        kernels = "  ".join(f"{key} {value}" for key, value in row["kernels"].items())
        times = f"{row['forward']:8.4f} {ratios[0]:8.2f} {row['backward']:8.4f} {ratios[1]:8.2f}"
        print(f"{row['shape']:30s} {times}  {peer}; {kernels}")
    if args.out:
        args.out.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
