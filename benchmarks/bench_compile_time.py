"""Cold compile time of the tiny Qwen4-Exp model, forward and backward: this backend against plain Inductor.

    python benchmarks/bench_compile_time.py [--rounds 2] [--tokens 128] [--dtype bfloat16] [--how whole|layers]

Every measurement is a process of its own with all compile caches off and one compile thread; the backends take turns.
The baseline process never loads `ple_gdn` (its substitutions hold for a whole process), which it asserts. CPU seconds,
compiler processes included, are printed beside wall seconds: on a busy machine they are the ones to read.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
BACKENDS = ("ple_gdn", "inductor")


def cpu_seconds() -> float:
    """CPU seconds of this process and of the compilers it has waited for."""
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(entry.ru_utime + entry.ru_stime for entry in usage)


def measure(backend: str, tokens: int, dtype: str, how: str) -> dict[str, float]:
    """Seconds of the first forward and backward (compile included), wall and CPU, and of the second."""
    sys.path.insert(0, str(TESTS))
    import torch
    from hf import tiny

    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    model = tiny.build("qwen4_exp", getattr(torch, dtype))
    ids = tiny.tokens(2, tokens)
    tiny.step(model, ids)
    tiny.compile_model(model, how, backend, fullgraph=True)
    start, before = time.perf_counter(), cpu_seconds()
    tiny.step(model, ids)
    cold, cpu = time.perf_counter() - start, cpu_seconds() - before
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    start = time.perf_counter()
    tiny.step(model, ids)
    warm = time.perf_counter() - start
    loaded = "ple_gdn" in sys.modules
    assert loaded == (backend == "ple_gdn"), "the baseline process loaded ple_gdn"
    return {"cold": cold, "cpu": cpu, "compilers": compilers, "warm": warm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--how", default="whole", choices=("whole", "layers"))
    parser.add_argument("--backend", choices=BACKENDS, help="measure this one, here, and print JSON")
    given = parser.parse_args()
    if given.backend:
        print(json.dumps(measure(given.backend, given.tokens, given.dtype, given.how)))
        return
    options = ["--tokens", str(given.tokens), "--dtype", given.dtype, "--how", given.how]
    found: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    for index in range(given.rounds):
        for backend in BACKENDS:
            command = [sys.executable, __file__, "--backend", backend, *options]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds = json.loads(done.stdout.splitlines()[-1])
            found[backend].append(seconds)
            columns = "  ".join(f"{name} {value:6.1f} s" for name, value in seconds.items())
            print(f"round {index + 1}  {backend:9} {columns}", flush=True)
    for kind in ("cold", "cpu"):
        ours, theirs = (statistics.median(entry[kind] for entry in found[backend]) for backend in BACKENDS)
        print(f"median {kind}: ple_gdn {ours:.1f} s, inductor {theirs:.1f} s, ratio {ours / theirs:.3f} (bar 0.25)")


if __name__ == "__main__":
    main()
