"""Gated residual forward and backward on CUDA: eager, eager calls of our ops, plain Inductor, this backend.

    python benchmarks/bench_gated_residual.py [--rounds 12] [--repetitions 10] [--rows 32768 4096] [--csv out.csv]

Every provider is a process of its own (the baseline never loads `ple_gdn`); they take turns, `--repetitions` at a time,
"held", behind a kernel that keeps the GPU busy while the queue fills, and "called", on an idle GPU, where launches from
Python take .3 to .5 ms, more than the kernels at 4,096 rows. The ratio is that of the medians of plain Inductor, with
a bootstrap 95 % interval over rounds. Bytes are those that one forward and backward must move: every input and gradient
once, and the inputs again in the backward.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable

STREAMS, WIDTH, LOW_RANK = 4, 2560, 320
PROVIDERS = ("inductor", "ple_gdn", "eager", "eager_ops")
CASES = ("mix", "inject", "module")
# Elements of one row moved per case: mix reads up, normed twice and dy, writes y and two gradients; inject reads hidden
# twice, hyper_input and dy, writes y and dhidden (dhyper is dy).
ROW_ELEMENTS = {"mix": 6 * STREAMS * WIDTH + 2 * WIDTH, "inject": 3 * STREAMS * WIDTH + 3 * WIDTH}
MODES = ("held", "called")
BUSY_CYCLES = 4_000_000  # a repetition: 2 ms, which is what its launches take from Python at the most


def mix(up, normed):
    import torch

    gate = torch.sigmoid(up).unflatten(-1, (STREAMS, WIDTH))
    return (gate * normed.unflatten(-1, (STREAMS, WIDTH))).mean(dim=-2)


def inject(hidden, hyper_input, weights):
    return hyper_input + (hidden.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)


def module(hyper_input, norm, down, up, block):
    """A hyper connection as transformers writes it, with its injection; the block between is left out."""
    import torch
    from torch.nn.functional import linear, silu

    x = hyper_input.float().unflatten(-1, (STREAMS, WIDTH))
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    normed = (x.flatten(-2) * (1.0 + norm.float())).type_as(hyper_input)
    mixed = mix(linear(silu(linear(normed, down) / STREAMS), up), normed)
    return inject(mixed, hyper_input, 2 * torch.sigmoid(linear(normed, block) / STREAMS))


def shapes(case: str, rows: int) -> list[tuple[int, ...]]:
    wide = STREAMS * WIDTH
    return {
        "mix": [(rows, wide), (rows, wide)],
        "inject": [(rows, WIDTH), (rows, wide), (rows, STREAMS)],
        "module": [(rows, wide), (wide,), (LOW_RANK, wide), (wide, LOW_RANK), (STREAMS, wide)],
    }[case]


def build(provider: str, case: str) -> Callable:
    import torch

    function = globals()[case]
    if provider == "eager":
        return function
    if provider == "inductor":
        return torch.compile(function, fullgraph=True)
    import ple_gdn

    if provider == "ple_gdn":
        return torch.compile(function, backend="ple_gdn", fullgraph=True)
    direct = {
        "mix": lambda up, normed: ple_gdn.gated_residual_mix(up, normed, STREAMS),
        "inject": ple_gdn.gated_residual_inject,
    }
    return direct.get(case, function)


def worker(provider: str) -> None:
    """Answers lines `case rows repetitions mode` with the milliseconds of each repetition, as JSON."""
    import torch

    ready: tuple | None = None
    for line in sys.stdin:
        case, rows, repetitions, mode = line.split()
        if ready is None or ready[0] != (case, rows):
            ready = None
            torch.cuda.empty_cache()
            torch._dynamo.reset()  # or the second number of rows is compiled for any
            torch.manual_seed(0)
            scale = 0.02 if case == "module" else 1.0
            tensors = [
                (torch.randn(s, device="cuda") * (scale if i else 1.0)).bfloat16().requires_grad_()
                for i, s in enumerate(shapes(case, int(rows)))
            ]
            function = build(provider, case)
            upstream = torch.randn_like(function(*tensors))
            ready = (case, rows), function, tensors, upstream
            for _ in range(3):
                torch.autograd.grad(function(*tensors), tensors, upstream)
        _, function, tensors, upstream = ready
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(int(repetitions))]
        if mode == "held":
            torch.cuda._sleep(BUSY_CYCLES * len(events))
        for start, stop in events:
            start.record()
            torch.autograd.grad(function(*tensors), tensors, upstream)
            stop.record()
        torch.cuda.synchronize()
        print(json.dumps([start.elapsed_time(stop) for start, stop in events]), flush=True)
    assert ("ple_gdn" in sys.modules) == (provider in ("ple_gdn", "eager_ops")), "the baseline process loaded ple_gdn"


def ask(process: subprocess.Popen, request: str) -> list[float]:
    process.stdin.write(request + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker ended on request {request!r}")
    return json.loads(line)


def interval(ours: list[list[float]], baseline: list[list[float]]) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of medians, rounds resampled in pairs."""
    generator = random.Random(0)
    ratios = []
    for _ in range(1000):
        picked = [generator.randrange(len(ours)) for _ in ours]
        pooled = [[t for i in picked for t in rounds[i]] for rounds in (ours, baseline)]
        ratios.append(statistics.median(pooled[0]) / statistics.median(pooled[1]))
    ratios.sort()
    return ratios[25], ratios[974]


def summary(case: str, rows: int, mode: str, times: dict[str, list[list[float]]]) -> list[tuple]:
    """A line for each provider, printed as well."""
    lines = []
    for provider, rounds in times.items():
        median = statistics.median(t for r in rounds for t in r)
        baseline = times.get("inductor", rounds)
        ratio = median / statistics.median(t for r in baseline for t in r)
        low, high = interval(rounds, baseline)
        speed = f"{ROW_ELEMENTS[case] * rows * 2 / median / 1e6:.0f}" if case in ROW_ELEMENTS else ""
        figures = (f"{figure:.4f}" for figure in (median, ratio, low, high))
        lines.append((case, rows, mode, provider, *figures, speed))
        print(*(f"{cell!s:>10}" for cell in lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=PROVIDERS, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--rows", type=int, nargs="+", default=[32768, 4096])
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--providers", nargs="+", default=PROVIDERS, choices=PROVIDERS)
    parser.add_argument("--csv", help="write the table there as well")
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, __file__, "--worker"]
    processes = {p: subprocess.Popen([*command, p], **pipes) for p in args.providers}
    table = [("case", "rows", "queue", "provider", "median ms", "ratio", "low", "high", "GB/s")]
    for case in args.cases:
        for rows in args.rows:
            for process in processes.values():
                ask(process, f"{case} {rows} 1 called")  # one at a time: Inductor times its configurations
            for mode in MODES:
                times: dict[str, list[list[float]]] = {p: [] for p in processes}
                for _ in range(args.rounds):
                    for provider, process in processes.items():
                        times[provider].append(ask(process, f"{case} {rows} {args.repetitions} {mode}"))
                table += summary(case, rows, mode, times)
    for process in processes.values():
        process.stdin.close()
        process.wait()
        assert process.returncode == 0
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            csv.writer(file).writerows(table)


if __name__ == "__main__":
    main()
