"""The backward of the gated delta rule in spans, by form: bits against one span, milliseconds, peak. Below 3 minutes.

    python benchmarks/time_spans.py [--shapes 1x32768 ...] [--forms spans ...] [--out FILE]

Forms change `ops/gated_delta_rule/configs.py`'s SPANS: "whole" has neither spans nor legs. The gradients of a form
have to be those of "whole", bit for bit, at every shape. Times are medians of events, the peak is of the last call,
inputs included; the table comes last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import ple_gdn
from ple_gdn.ops.gated_delta_rule import configs

PACK = (40961, 3000, 65000, 17, 9000, 120000, 24009)
# Name: batch rows or lengths of a pack, H, HV.
SHAPES: dict[str, tuple[Any, int, int]] = {
    "1x32768": ((1, 32768), 16, 48),
    "8x4096": ((8, 4096), 16, 48),
    "1x8192": ((1, 8192), 16, 48),
    "2 packed": ([16384, 16384], 16, 48),
    "8 packed": ([4000, 4192] * 4, 16, 48),
    "1x32768 of 64": ((1, 32768), 16, 64),
    "(2, 6) pack": (list(PACK), 2, 6),
}
BASE = configs.SPANS
FORMS = {
    "whole": BASE._replace(leg=1 << 20, alone_bytes=1 << 50),
    "spans": BASE,
    "legs of 16": BASE._replace(leg=16),
    "half spans": BASE._replace(span_bytes=BASE.span_bytes // 2),
    "short spans": BASE._replace(span_bytes=BASE.span_bytes // 4),
}


def inputs(shape: tuple[Any, int, int], device: str) -> tuple[list[torch.Tensor], torch.Tensor, Any]:
    """Leaves, upstream gradient and packing, as the peers of validate_gdn.py get them."""
    sizes, H, HV = shape
    B, T = sizes if isinstance(sizes, tuple) else (1, sum(sizes))
    torch.manual_seed(0)

    def unit() -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(B, T, H, 128, device=device), dim=-1).bfloat16()

    v = torch.randn(B, T, HV, 128, device=device).bfloat16()
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, HV, device=device)) / 4
    leaves = [x.requires_grad_() for x in (unit(), unit(), v, g, torch.sigmoid(torch.randn(B, T, HV, device=device)))]
    packing = None
    if isinstance(sizes, list):
        boundaries = torch.tensor(list(accumulate(sizes, initial=0)), device=device)
        packing = ple_gdn.prepare_varlen(boundaries)
    return leaves, torch.randn_like(v), packing


def median(call: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in events:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return sorted(first.elapsed_time(last) for first, last in events)[repeats // 2]


def kernels(call: Callable[[], object]) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {e.key: round(e.device_time_total / 1e3, 3) for e in profile.key_averages() if "_kernel" in e.key}


def measure(shape: tuple[Any, int, int], forms: list[str], device: str, repeats: int) -> dict[str, dict[str, Any]]:
    leaves, do, packing = inputs(shape, device)

    def forward() -> torch.Tensor:
        return ple_gdn.gated_delta_rule(*leaves, cu_seqlens=packing)[0]

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, do)

    configs.SPANS = FORMS["whole"]
    expected = [x.cpu() for x in both()]
    rows = {}
    for form in forms:
        configs.SPANS = FORMS[form]
        row: dict[str, Any] = {"equal": all(torch.equal(a.cpu(), b) for a, b in zip(both(), expected, strict=True))}
        if device == "cuda":
            row |= {"forward": median(forward, repeats), "both": median(both, repeats)}
            torch.cuda.reset_peak_memory_stats()
            both()
            row |= {"peak_mib": torch.cuda.max_memory_allocated() / 2**20, "kernels": kernels(both)}
        rows[form] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    for name in args.shapes:
        results[name] = measure(SHAPES[name], args.forms, args.device, args.repeats)
        print(json.dumps({name: results[name]}), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    print("\nshape, form: bits, forward ms, forward and backward ms, peak MiB; kernels of both")
    for name, rows in results.items():
        for form, row in rows.items():
            times = "".join(f"{row.get(key, float('nan')):9.3f}" for key in ("forward", "both"))
            listed = "  ".join(
                f"{k.removesuffix('_kernel')} {v}" for k, v in row.get("kernels", {}).items() if v > 0.02
            )
            bits = "equal" if row["equal"] else "WRONG"
            print(f"{name:14s} {form:13s} {bits} {times} {row.get('peak_mib', float('nan')):7.0f}  {listed}")


if __name__ == "__main__":
    main()
