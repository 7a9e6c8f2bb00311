"""The gated residual module on a GPU, 50 s: plain Inductor against this backend, and where the time is by kernel.

    python benchmarks/time_gated_residual_module.py [4096] [32768]

Every provider and size is a process of its own (static shapes; the baseline never loads ple_gdn). They compile at once;
only one at a time may benchmark configurations. Then 16 rounds of 10 repetitions in turns, then a profile of 10.
"loops kept" is this backend with Inductor's loop_ordering_after_fusion off (information, not a provider).
"""

from __future__ import annotations

import fcntl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_gated_residual as bench  # (beside this script)
import workers

ROUNDS, REPETITIONS, TOP = 16, 10, 9
CASES = [("inductor", 4096), ("ple_gdn", 4096), ("loops kept", 4096), ("inductor", 32768), ("ple_gdn", 32768)]


def make() -> Callable[[str], dict[str, Any]]:
    provider, rows, lock = sys.argv[2], int(sys.argv[3]), sys.argv[4]
    import torch
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    chosen: dict[str, str] = {}
    tune = CachingAutotuner.autotune_to_one_config

    def alone(self: CachingAutotuner, *args: Any, **kwargs: Any) -> Any:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            torch.cuda.synchronize()
            result = tune(self, *args, **kwargs)
        config = self.launchers[0].config
        blocks = ",".join(f"{k[0]}{v}" for k, v in config.kwargs.items() if "BLOCK" in k)
        chosen[self.inductor_meta["kernel_name"]] = f"{blocks} w{config.num_warps}"
        return result

    CachingAutotuner.autotune_to_one_config = alone
    if provider == "loops kept":
        function = torch.compile(
            bench.module, backend="ple_gdn", fullgraph=True, options={"loop_ordering_after_fusion": False}
        )
    else:
        function = bench.build(provider, "module")
    torch.manual_seed(0)
    tensors = [
        (torch.randn(s, device="cuda") * (0.02 if i else 1.0)).bfloat16().requires_grad_()
        for i, s in enumerate(bench.shapes("module", rows))
    ]
    upstream = torch.randn_like(tensors[0])

    def once() -> None:
        torch.autograd.grad(function(*tensors), tensors, upstream)

    for _ in range(3):
        once()
    torch.cuda.synchronize()

    def answer(what: str) -> dict[str, Any]:
        if what == "ready":
            return {"loaded": "ple_gdn" in sys.modules}
        if what == "time":
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPETITIONS)]
            torch.cuda._sleep(bench.BUSY_CYCLES * REPETITIONS)
            for start, stop in events:
                start.record()
                once()
                stop.record()
            torch.cuda.synchronize()
            return {"ms": [start.elapsed_time(stop) for start, stop in events]}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(10):
                once()
            torch.cuda.synchronize()
        total: dict[str, list[float]] = {}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                total.setdefault(event.name, []).append(event.self_device_time_total)
        kernels = [[n, sum(us) / 10, len(us) / 10, chosen.get(n, "")] for n, us in total.items()]
        return {"kernels": sorted(kernels, key=lambda k: -k[1])}

    return answer


def main() -> None:
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp())
    (folder / "lock").touch()
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "3", "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    crew = {}
    wanted = [int(rows) for rows in sys.argv[1:]] or [4096, 32768]
    for i, (provider, rows) in enumerate(c for c in CASES if c[1] in wanted):
        command = [__file__, "--worker", provider, str(rows), str(folder / "lock")]
        # Caches of their own: no configuration chosen for one is taken up by another.
        own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache{i}"), "TRITON_CACHE_DIR": str(folder / f"triton{i}")}
        crew[provider, rows] = workers.Worker(command, folder / f"log{i}", {**env, **own})
    for worker in crew.values():
        worker.send(what="ready")
    for case, worker in crew.items():
        got = worker.answer(max(1.0, 110 - (time.monotonic() - began)))
        if "failed" in got:
            print(*case, "FAILED", got["failed"])
        elif got["loaded"] == (case[0] == "inductor"):
            print(*case, "loaded ple_gdn:", got["loaded"])
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    crew = {case: worker for case, worker in crew.items() if not worker.failed}
    times: dict[tuple[str, int], list[list[float]]] = {case: [] for case in crew}
    for _ in range(ROUNDS):
        for case, worker in crew.items():
            got = worker.ask(20, what="time")
            if "ms" in got:
                times[case].append(got["ms"])
    kernels = {case: worker.ask(20, what="profile").get("kernels", []) for case, worker in crew.items()}
    for worker in crew.values():
        worker.stop()
    for (provider, rows), top in kernels.items():
        print(f"\n{provider}, {rows} rows: {sum(k[1] for k in top):.0f} us in kernels")
        for name, us, calls, config in top[:TOP]:
            short = name if len(name) < 74 else f"{name[:34]}..{name[-36:]}"
            print(f"  {us:8.1f} us x{calls:<3.0f} {config:16s} {short}")
    print()
    for (provider, rows), rounds in times.items():
        baseline = times.get(("inductor", rows), [])
        if len(rounds) != ROUNDS or len(baseline) != ROUNDS:
            print(f"{provider:12s} {rows:6d}  incomplete")
            continue
        median = statistics.median(t for r in rounds for t in r)
        ratio = median / statistics.median(t for r in baseline for t in r)
        low, high = bench.interval(rounds, baseline)
        print(f"{provider:12s} {rows:6d}  {median:.4f} ms  ratio {ratio:.4f} ({low:.4f} to {high:.4f})")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        workers.serve(make)
    else:
        main()
