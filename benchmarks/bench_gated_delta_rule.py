"""Gated delta rule on one GPU: forward and backward times and peak memory, beside the peers', against floors.

    python benchmarks/bench_gated_delta_rule.py [--save-mode full] [--out results.json]
    python benchmarks/bench_gated_delta_rule.py --peers flash_qla fla --site /opt/peers --out results.json
    python benchmarks/bench_gated_delta_rule.py --device cpu [--peers ...]    # small shapes: does it run?

Every provider and shape is a process of its own; those of a shape are timed in turn, in blocks of five calls. `--site`
is a folder of packages that only the peers' processes see, which never load `ple_gdn`. All get the same inputs (q and k
normalised beforehand, no l2norm inside, bf16), also "ple_gdn l2norm", which normalises once more. Milliseconds are
medians of event-timed calls that need gradients, launched back to back: `forward`, and `both` for forward and backward.
In `_held` the queue is held until five calls are enqueued, so the host's time is out. `cold_s` is the first forward and
backward of a process, ours with an empty Triton cache, while all others start too; FlashQLA's second figure is with an
empty TileLang cache. Peak: `max_memory_allocated` of one forward and backward, inputs (`inputs_mib`) included. FLA
comes last, since it tunes itself for minutes; its FlashQLA backend is off. Where the norm of an output or gradient is
more than 2 % from ours, the last column has a `!`.

Floors (design: one read of each input, one write of each output, tensor-core products once): with H, HV heads, widths
K, V and chunk C = 64, per token forward bytes 4HK + HV(4V + 8), FLOPs HV(6KV + 4CV + 2/3 C^2) + 4HCK; backward bytes
8HK + HV(6V + 16), FLOPs HV(16KV + 10CV + 8CK) + 2HCK with h and delta replayed. Ceilings measured on an H200:
4.25 TB/s and 716 TFLOP/s.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from workers import Worker, serve  # (beside this script)

CHUNK = 64
BYTES_PER_MS = 4.25e9
FLOPS_PER_MS = 716e9
PACK = (40961, 3000, 65000, 17, 9000, 120000, 24009)
OURS = ("ple_gdn", "ple_gdn l2norm")
PEERS = ("flash_qla", "fla")
PACKAGES = ("torch", "triton", "flash_qla", "tilelang", "apache-tvm-ffi", "fla-core", "ple-gdn")
# Names of a block's times: what is called, and whether the queue is held. 5 blocks of 5 calls: 25 repetitions.
KINDS = {
    "forward": ("forward", False),
    "both": ("both", False),
    "forward_held": ("forward", True),
    "both_held": ("both", True),
}
BLOCKS, CALLS = 5, 5
HOLD_CYCLES = 60_000_000  # 30 ms or more; the host needs up to 5 for a call
START_SECONDS, FLA_SECONDS, BLOCK_SECONDS = 200.0, 200.0, 20.0


class Shape(NamedTuple):
    name: str
    B: int
    T: int
    H: int
    HV: int
    pack: tuple[int, ...] | None = None


SHAPES = (
    Shape("1x32768 (16,48)", 1, 32768, 16, 48),
    Shape("8x4096 (16,48)", 8, 4096, 16, 48),
    Shape("1x8192 (16,48)", 1, 8192, 16, 48),
    Shape("pack 261987 (2,6)", 1, sum(PACK), 2, 6, PACK),
)
SMALL = (Shape("2x70 (1,3)", 2, 70, 1, 3), Shape("pack 130 (1,2)", 1, 130, 1, 2, (65, 1, 64)))


def all_shapes(device: str) -> tuple[Shape, ...]:
    return SHAPES if device == "cuda" else SMALL


def floors(tokens: int, H: int, HV: int, K: int = 128, V: int = 128) -> tuple[float, float]:
    """Least milliseconds of the forward and of the backward: the larger of bytes and FLOPs over their ceilings."""
    forward = 4 * H * K + HV * (4 * V + 8), HV * (6 * K * V + 4 * CHUNK * V + 2 / 3 * CHUNK**2) + 4 * H * CHUNK * K
    backward = (
        8 * H * K + HV * (6 * V + 16),
        HV * (16 * K * V + 10 * CHUNK * V + 8 * CHUNK * K) + 2 * H * CHUNK * K,
    )
    return tuple(tokens * max(size / BYTES_PER_MS, flops / FLOPS_PER_MS) for size, flops in (forward, backward))


def rule_of(provider: str, pack: tuple[int, ...] | None, device: str, save_mode: str) -> Callable[..., torch.Tensor]:
    """The provider's rule over (q, k, v, g, beta), all its other choices at their defaults."""
    bounds = None if pack is None else torch.tensor((0, *accumulate(pack)), device=device)
    if provider in OURS:
        import ple_gdn

        packing = None if pack is None else ple_gdn.prepare_varlen(bounds)
        norm = provider.endswith("l2norm")
        return lambda *inputs: ple_gdn.gated_delta_rule(
            *inputs, use_qk_l2norm=norm, save_mode=save_mode, cu_seqlens=packing
        )[0]
    if provider == "flash_qla":
        from flash_qla import chunk_gated_delta_rule
    else:
        os.environ["FLA_FLASH_QLA"] = "0"
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    return lambda *inputs: chunk_gated_delta_rule(*inputs, cu_seqlens=bounds)[0]


class Subject:
    """What a worker process times."""

    def __init__(self, provider: str, shape: Shape, device: str, save_mode: str) -> None:
        self.provider, self.cuda = provider, device == "cuda"
        if not self.cuda:
            torch.set_num_threads(1)
        B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, 128, 128
        torch.manual_seed(0)
        unit = lambda: torch.nn.functional.normalize(torch.randn(B, T, H, K, device=device), dim=-1)  # noqa: E731
        q, k = unit().bfloat16(), unit().bfloat16()
        v = torch.randn(B, T, HV, V, device=device, dtype=torch.bfloat16)
        g = torch.nn.functional.logsigmoid(torch.randn(B, T, HV, device=device)) / 4
        beta = torch.sigmoid(torch.randn(B, T, HV, device=device))
        self.do = torch.randn_like(v)
        self.inputs = tuple(x.requires_grad_() for x in (q, k, v, g, beta))
        self.rule = rule_of(provider, shape.pack, device, save_mode)
        self.calls = {"forward": self.forward, "both": self.both}

    def forward(self) -> torch.Tensor:
        return self.rule(*self.inputs)

    def both(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.inputs, self.do)

    def answer(self, what: str, **options: Any) -> dict[str, Any]:
        return {"start": self.start, "block": self.block, "kernels": self.kernels}[what](**options)

    def start(self) -> dict[str, Any]:
        self.settle()
        began = time.perf_counter()
        gradients = self.both()
        self.settle()
        found: dict[str, Any] = {"cold_s": round(time.perf_counter() - began, 2)}
        found["norms"] = [x.float().norm().item() for x in (self.forward().detach(), *gradients)]
        del gradients
        if self.cuda:
            torch.cuda.empty_cache()  # also what tuning left
            torch.cuda.reset_peak_memory_stats()
            found["inputs_mib"] = round(torch.cuda.memory_allocated() / 2**20, 1)
            self.both()
            found["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
        loaded = "ple_gdn" in sys.modules
        assert loaded == (self.provider in OURS), "a peer's process loaded ple_gdn"
        self.settle()
        return found

    def settle(self) -> None:
        """Waits, and gives memory back: the processes of other shapes stay beside this one."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def block(self, kind: str) -> dict[str, Any]:
        """Milliseconds of each of a few calls, after untimed ones."""
        name, held = KINDS[kind]
        call = self.calls[name]
        call()
        if not self.cuda:
            began = [time.perf_counter() for _ in range(CALLS + 1) if call() is not None]
            return {"ms": [1e3 * (b - a) for a, b in pairwise(began)]}
        call()
        torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
        if held:
            torch.cuda._sleep(HOLD_CYCLES)
        for first, last in events:
            first.record()
            call()
            last.record()
        self.settle()
        return {"ms": [first.elapsed_time(last) for first, last in events]}

    def kernels(self) -> dict[str, float]:
        """Milliseconds of device time of each kernel of one forward and backward."""
        if not self.cuda:
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.both()
            torch.cuda.synchronize()
        return {
            e.key[:60]: round(e.device_time_total / 1e3, 4) for e in profile.key_averages() if e.device_time_total > 1
        }


class Bench:
    """Workers by shape and provider, and the report, which is written after every step."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.shapes = [s for s in all_shapes(args.device) if not args.shapes or s.name in args.shapes]
        self.cold_shape = self.shapes[-2] if len(self.shapes) > 1 else self.shapes[0]
        self.deadline = time.monotonic() + args.seconds
        self.workers: dict[tuple[str, str], Worker] = {}
        self.report: dict[str, Any] = {"device": device_name(args.device), "versions": versions(args.site)}
        self.report["options"] = {"save_mode": args.save_mode, "l2norm": False, "repeats": BLOCKS * CALLS}
        self.rows: dict[str, dict[str, dict[str, Any]]] = {shape.name: {} for shape in self.shapes}
        self.report["rows"] = self.rows
        for shape in self.shapes:
            forward, backward = floors(shape.B * shape.T, shape.H, shape.HV)
            self.rows[shape.name]["floor"] = {"forward": round(forward, 4), "both": round(forward + backward, 4)}

    def left(self, limit: float) -> float:
        return max(1.0, min(limit, self.deadline - time.monotonic()))

    def worker(self, provider: str, shape: Shape, cold: bool) -> Worker:
        """`cold` empties the caches of compiled kernels; ours is cold anyway."""
        name = f"{provider} {shape.name}{' cold' if cold else ''}".replace(" ", "_")
        environment = {"PYTHONUNBUFFERED": "1"}
        if provider in OURS or cold:
            environment["TRITON_CACHE_DIR"] = tempfile.mkdtemp(dir=self.folder)
            environment["TILELANG_CACHE_DIR"] = tempfile.mkdtemp(dir=self.folder)
        if provider not in OURS and self.args.site:
            environment["PYTHONPATH"] = os.pathsep.join([str(self.args.site), os.environ.get("PYTHONPATH", "")])
        command = [__file__, "--worker", provider, shape.name, "--device", self.args.device]
        log = self.args.logs or self.folder
        made = Worker([*command, "--save-mode", self.args.save_mode], log / f"{name}.log", environment)
        made.send(what="start")
        return made

    def start(self, providers: list[str], limit: float) -> None:
        began = time.monotonic()
        for shape in self.shapes:
            for provider in providers:
                self.workers[shape.name, provider] = self.worker(provider, shape, cold=False)
        for (shape_name, provider), worker in self.workers.items():
            if provider in providers:
                row = self.rows[shape_name][provider] = worker.answer(self.left(limit - (time.monotonic() - began)))
                self.compare_norms(shape_name, provider)
                print(f"{shape_name:18s} {provider:14s} {row.get('failed') or row['cold_s']}", flush=True)
        self.write()

    def compare_norms(self, shape: str, provider: str) -> None:
        mine, theirs = (self.rows[shape].get(p, {}).get("norms") for p in (OURS[0], provider))
        if mine and theirs:
            worst = max(abs(b / a - 1) if a else abs(b) for a, b in zip(mine, theirs, strict=True))
            self.rows[shape][provider]["norms_off"] = round(worst, 5)

    def time(self, shape: Shape) -> None:
        """All providers of a shape in turn; a later call (with FLA beside them) replaces earlier times."""
        workers = {p: w for (name, p), w in self.workers.items() if name == shape.name and not w.failed}
        times = {(p, kind): [] for p in workers for kind in KINDS}
        for _ in range(BLOCKS):
            for kind in KINDS:
                for provider, worker in workers.items():
                    found = worker.ask(self.left(BLOCK_SECONDS), what="block", kind=kind)
                    times[provider, kind] += found.get("ms", [])
        for provider, worker in workers.items():
            row = self.rows[shape.name][provider]
            row |= {k: round(statistics.median(times[provider, k]), 4) for k in KINDS if times[provider, k]}
            if not worker.failed and "kernels" not in row:
                row["kernels"] = worker.ask(self.left(BLOCK_SECONDS), what="kernels")
            if worker.failed:
                row["failed"] = worker.failed
        self.write()

    def cold_peer(self, worker: Worker, began: float) -> None:
        row = self.rows[self.cold_shape.name]["flash_qla"]
        found = worker.answer(self.left(FLA_SECONDS - (time.monotonic() - began)))
        row["cold_s_empty_cache"] = found.get("cold_s", found.get("failed"))
        worker.stop()

    def run(self) -> None:
        peers = self.args.peers
        first = [*OURS, *(p for p in peers if p != "fla")]
        self.start(first, START_SECONDS)
        for shape in self.shapes:
            self.time(shape)
        print(self.table(), flush=True)
        began = time.monotonic()
        cold = self.worker("flash_qla", self.cold_shape, cold=True) if "flash_qla" in peers else None
        if "fla" in peers and self.deadline - began > 60:
            self.start(["fla"], FLA_SECONDS)
        if cold:
            self.cold_peer(cold, began)
        if "fla" in peers:
            for shape in self.shapes:
                worker = self.workers.get((shape.name, "fla"))
                if worker and not worker.failed and self.deadline - time.monotonic() > 10:
                    self.time(shape)
        self.write()
        print(self.table(), flush=True)

    def write(self) -> None:
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps(self.report, indent=1) + "\n")

    def table(self) -> str:
        head = ("shape", "provider", *KINDS, "peak MiB", "cold s", "norms")
        lines = [("{:18s} {:14s}" + " {:>12s}" * (len(head) - 2)).format(*head)]
        for shape, providers in self.rows.items():
            for provider, row in providers.items():
                cells = [row.get(kind, "-") for kind in KINDS]
                cold = f"{row.get('cold_s', '-')} {row.get('cold_s_empty_cache', '')}"
                off = row.get("norms_off")
                cells += [row.get("peak_mib", "-"), cold, "-" if off is None else f"{off}{'' if off <= 0.02 else '!'}"]
                text = "".join(f" {c!s:>12s}" for c in cells) + (
                    "  FAILED " + row["failed"] if row.get("failed") else ""
                )
                lines.append(f"{shape:18s} {provider:14s}{text}")
            mine = providers.get(OURS[0], {})
            for peer in (p for p in PEERS if "both" in mine and "both" in providers.get(p, {})):
                ratios = (f"{mine[k] / providers[peer][k]:.3f}" for k in (*KINDS, "peak_mib") if k in mine)
                lines.append(f"{shape:18s} {'  / ' + peer:14s}" + "".join(f" {r:>12s}" for r in ratios))
        return "\n".join(lines)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.processor()


def versions(site: Path | None) -> dict[str, str]:
    places = [*([str(site)] if site else []), *sys.path]
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        distribution = next(iter(importlib.metadata.distributions(name=name, path=places)), None)
        if distribution:
            found[name] = distribution.version
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[])
    parser.add_argument("--site", type=Path, help="folder with the peers' packages")
    parser.add_argument("--shapes", nargs="+", choices=[s.name for s in (*SHAPES, *SMALL)], help="these alone")
    parser.add_argument("--save-mode", choices=("light", "full"), default="light")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=420, help="for everything")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for what the workers print")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        provider, name = args.worker
        shape = next(s for s in all_shapes(args.device) if s.name == name)
        serve(lambda: Subject(provider, shape, args.device, args.save_mode).answer)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bench = Bench(args, Path(folder))
        try:
            bench.run()
        finally:
            for worker in bench.workers.values():
                worker.stop()


if __name__ == "__main__":
    main()
