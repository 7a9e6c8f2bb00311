"""Shared harness of the benchmarks: peers in processes of their own, interleaved; medians; bytes and floor; CSV.

A peer is a script run with `--worker <name>`: it builds its workload, prints one line "ready", then answers every line
on its standard input by timing once and printing the milliseconds. The driver asks the peers in turn, so that drift of
the clocks touches all alike, and no peer shares a process (or an imported package) with another.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
# Bytes read plus written per second by a large device-to-device copy on the H200 the results were taken on.
H200_BYTES_PER_S = 4.15e12
REPEATS = 25


def versions() -> dict[str, str]:
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": driver,
    }


def time_once(call: Callable[[], object], flush: torch.Tensor) -> float:
    """Milliseconds of device time of one call: the L2 is overwritten, and the queue held while the host enqueues it."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4_000_000)
    flush.zero_()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def serve(call: Callable[[], object], warmups: int = 3) -> None:
    """Worker side: warm up, then time one call per request line."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(warmups):
        call()
    torch.cuda.synchronize()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(f"{time_once(call, flush):.6f}", flush=True)


def interleave(script: Path, workers: dict[str, list[str]], repeats: int = REPEATS) -> dict[str, float]:
    """Median milliseconds of each worker; `workers` maps a name to the arguments after `--worker`."""
    start = [sys.executable, str(script), "--worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    processes = {name: subprocess.Popen([*start, *arguments], **pipes) for name, arguments in workers.items()}
    times: dict[str, list[float]] = {name: [] for name in workers}
    try:
        for process in processes.values():
            _expect_ready(process)
        for _ in range(repeats):
            for name, process in processes.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                times[name].append(float(process.stdout.readline()))
    finally:
        for process in processes.values():
            process.stdin.close()
            process.wait(timeout=60)
    return {name: statistics.median(values) for name, values in times.items()}


def _expect_ready(process: subprocess.Popen) -> None:
    for line in process.stdout:
        if line.strip() == "ready":
            return
    raise RuntimeError(f"worker {process.args} ended before it was ready")


def write_csv(name: str, rows: Iterable[dict[str, object]]) -> Path:
    """Writes `rows` with the versions appended to benchmarks/results/<name>.csv."""
    rows = [{**row, **versions()} for row in rows]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
