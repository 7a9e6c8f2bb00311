"""PLE gate and convolution on CUDA against the eager chain and plain Inductor of the same chain.

    python benchmarks/bench_ple.py [--quick]

Peers run `tests/oracles/ple.py:ple_chain`, the operations of `Qwen4ExpTextPLELayer.forward` after its projections, in
processes that never import `ple_gdn`. Floor: every input and gradient once over the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from common import H200_BYTES_PER_S, interleave, serve, time_once, write_csv  # noqa: E402

STREAMS, CHANNELS, KERNEL, DILATION = 4, 2560, 4, 3
WIDTH = STREAMS * CHANNELS
CU_SEQLENS = (0, 0.09, 0.092, 0.28, 0.61, 1)


def make(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The seven inputs (leaves) and a gradient of the output."""
    torch.manual_seed(0)
    shapes = [(1, tokens, WIDTH)] * 2 + [(1, tokens, CHANNELS)] + [(WIDTH,)] * 3 + [(WIDTH, 1, KERNEL)]
    scales = (1, 1, 1, 0.2, 0.2, 0.2, 0.5)
    inputs = [torch.randn(s, device="cuda", dtype=dtype).mul_(x) for s, x in zip(shapes, scales, strict=True)]
    return [x.requires_grad_() for x in inputs], torch.randn(1, tokens, WIDTH, device="cuda", dtype=dtype)


def workload(name: str, tokens: int, part: str) -> Callable[[], object]:
    inputs, dout = make(tokens)
    if name.startswith("ple_gdn"):
        import ple_gdn

        options = {}
        if name == "ple_gdn packed":
            options["cu_seqlens"] = torch.tensor([int(x * tokens) for x in CU_SEQLENS], device="cuda")
        chain = lambda *x: ple_gdn.ple_gate_conv(*x, dilation=DILATION, **options)  # noqa: E731
    else:
        from oracles.ple import ple_chain

        chain = lambda *x: ple_chain(*x, dilation=DILATION)  # noqa: E731
        if name == "inductor":
            chain = torch.compile(chain)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return chain(*inputs)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(chain(*inputs), inputs, dout)

    return forward if part == "forward" else both


def floor_bytes(tokens: int, part: str) -> int:
    """bf16: forward reads q, k, v and writes out; backward reads dout, q, k, v and writes three gradients."""
    forward = 3 * WIDTH + CHANNELS
    return 2 * tokens * (forward if part == "forward" else forward + 5 * WIDTH + 2 * CHANNELS)


def memory(tokens: int) -> dict[str, object]:
    """Bytes kept after the forward and the peak beyond inputs, output and gradients, with the caching allocator."""
    import ple_gdn

    inputs, dout = make(tokens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = ple_gdn.ple_gate_conv(*inputs, dilation=DILATION)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    forward_peak = torch.cuda.max_memory_allocated() - before - out.nbytes
    grads = torch.autograd.grad(out, inputs, dout)
    peak = torch.cuda.max_memory_allocated() - before - out.nbytes - sum(x.nbytes for x in grads)
    last = slice(tokens - 64 - (KERNEL - 1) * DILATION, tokens)
    alone = ple_gdn.ple_gate_conv(*(x[:, last] for x in inputs[:3]), *inputs[3:], dilation=DILATION)
    same = torch.equal(alone[:, -64:], out[:, -64:])
    alone_grads = torch.autograd.grad(alone, inputs, dout[:, last])
    same_grads = all(torch.equal(x[:, -64:], y[:, -64:]) for x, y in zip(alone_grads[:3], grads[:3], strict=True))
    finite = all(bool(x.isfinite().all()) for x in (out[:, -64:], *(g[:, -64:] for g in grads[:3])))
    return {
        "tokens": tokens,
        "kept_bytes": kept,
        "kept_bound": 64 * tokens * STREAMS,
        "forward_peak_bytes": forward_peak,
        "peak_bytes": peak,
        "peak_bound": (64 << 20) + 64 * tokens * STREAMS,
        "last_64_rows_equal_alone": same and same_grads and finite,
    }


def time_alone(tokens: int, part: str) -> float:
    """Median of `ple_gdn` in this process; used at sizes the peers do not fit."""
    call, flush = workload("ple_gdn", tokens, part), torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    return statistics.median(time_once(call, flush) for _ in range(20))


def _row(name: str, tokens: int, part: str, milliseconds: float) -> dict[str, object]:
    size = floor_bytes(tokens, part)
    floor = size / H200_BYTES_PER_S * 1e3
    return {
        "peer": name,
        "tokens": tokens,
        "part": part,
        "ms": round(milliseconds, 4),
        "floor_ms": round(floor, 4),
        "of_floor": round(milliseconds / floor, 2),
        "floor_mb": round(size / 1e6),
        "us_per_token": round(1e3 * milliseconds / tokens, 4),
    }


def _print(row: dict[str, object]) -> None:
    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=3, metavar=("PEER", "TOKENS", "PART"))
    parser.add_argument("--isolated", nargs=2, metavar=("WHAT", "TOKENS"))
    parser.add_argument("--quick", action="store_true", help="ple_gdn alone, no peers")
    options = parser.parse_args()
    if options.worker:
        name, tokens, part = options.worker
        return serve(workload(name, int(tokens), part))
    if options.isolated:
        what, tokens = options.isolated
        result = memory(int(tokens)) if what == "memory" else time_alone(int(tokens), what)
        return print(json.dumps(result))
    rows = []
    peers = ["ple_gdn", "ple_gdn packed"] + ([] if options.quick else ["eager", "inductor"])
    cases = [(n, t, p) for t, p in ((32768, "both"), (32768, "forward"), (8192, "both")) for n in peers]
    workers = {"|".join(map(str, case)): [case[0], str(case[1]), case[2]] for case in cases}
    for case, ms in zip(cases, interleave(Path(__file__), workers).values(), strict=True):
        rows.append(_row(*case, ms))
        _print(rows[-1])
    for tokens in (65536, 131072, 262144):
        rows.append(_row("ple_gdn", tokens, "both", _isolated("both", tokens)))
        _print(rows[-1])
    write_csv("ple_h200", rows)
    facts = [_isolated("memory", tokens) for tokens in (8192, 32768, 262144)]
    for fact in facts:
        _print(fact)
    write_csv("ple_memory_h200", facts)


def _isolated(what: str, tokens: int) -> object:
    command = [sys.executable, __file__, "--isolated", what, str(tokens)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
