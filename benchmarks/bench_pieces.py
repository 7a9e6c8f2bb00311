"""One command on a GPU, 2 to 3 minutes: documents walked in pieces of L chunks (ops/gated_delta_rule/pieces.py).

    python benchmarks/bench_pieces.py [--out DIRECTORY] [--part checks|times]

Checks, four classes side by side in processes of their own: pieces of 1 and 2 chunks against the float64 token
recurrence, gates and keys of GDN.md, windows of some heads, equal bits of runs, save modes, spans, and of a document
packed and alone; no synchronising call; then with the pinned L on long documents, with windows and with maps.
Times: forward, forward and backward, peak memory, and every kernel by its role, for some L, with L = 0 for documents
walked whole; `*` marks the pinned one. Tables come last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from oracles.gdn import NAMES, Case, make_case, oracle, relative_rms, run_front

import ple_gdn
from ple_gdn.ops.gated_delta_rule import configs

PINNED_CUTS, PINNED_SPANS, PINNED_FAINT = configs.CUTS, configs.SPANS, configs.FAINT
TINY_SPANS = configs.SpanConfig(leg=1, alone_bytes=0, span_bytes=0)
# Processes: dtype, width of keys and values. The first walks with the Gluon kernels.
CLASSES = (("bfloat16", 128), ("float16", 128), ("bfloat16", 64), ("float32", 64))
LENGTHS = {"pack": (330, 0, 1, 64, 65, 200), "unpacked": (450,)}
MODES = ("no_decay", "strong_decay", "one_reset", "near_equal_keys", "zero_keys", "beta_two")
PLAIN = {"bfloat16": (4e-3, 5e-3), "float16": (2e-3, 2e-3), "float32": (1e-5, 1e-5)}
STRESS = {"bfloat16": (7e-3, 8e-3), "float16": (2e-3, 2e-3), "float32": (1e-4, 1e-3)}
CHECK_SECONDS, TIME_SECONDS = 150, 150

PACK = (40961, 3000, 65000, 17, 9000, 120000, 24009)
# Documents, heads, value heads, the L to time.
SHAPES = {
    "pack (2, 6)": (PACK, 2, 6, (0, 32, 64, 96, 128, 192)),
    "1x32768 (2, 6)": ((32768,), 2, 6, (0, 32, 64, 128)),
    "8x32768 (2, 6)": ((32768,) * 8, 2, 6, (0, 64, 128)),
    "1x32768 (8, 16)": ((32768,), 8, 16, (0, 64, 128, 256)),
    "1x131072 (8, 16)": ((131072,), 8, 16, (0, 128, 256)),
}


def cut(length: int | None) -> None:
    """Documents are walked in pieces of `length` chunks; 0: whole; None: as pinned."""
    configs.CUTS = PINNED_CUTS if length is None else ((1 << 30, length),) if length else ()


def one(case: Case, n: int) -> Case:
    start, end = case.boundaries[n : n + 2]
    rows, index = slice(start, end), slice(n, n + 1)
    inputs = (*(x[:, rows] for x in case[:5]), case.initial_state[index], (0, end - start))
    return Case(*inputs, case.do[:, rows], case.dfinal_state[index])


def unequal(packed: dict, alone: dict, bounds: tuple[int, int], n: int) -> list[str]:
    part = lambda name: packed[name][n : n + 1] if "state" in name else packed[name][:, slice(*bounds)]  # noqa: E731
    return [name for name in NAMES if not torch.equal(part(name), alone[name])]


def say(case: str, worst: str, ratio: float) -> None:
    print(json.dumps({case: [worst, round(ratio, 3)]}), flush=True)


def say_bits(case: str, wrong: list) -> None:
    say(case, f"bits {wrong[0]}" if wrong else "bits", 99.0 if wrong else 0.0)


def on_gpu(case: Case) -> Case:
    return Case(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in case))


def check(dtype: str, width: int) -> None:
    """Worst error over its budget of every case, one JSON line each."""
    sizes = {"heads": 2, "value_heads": 6, "key_width": width, "value_width": width, "dtype": getattr(torch, dtype)}
    name = f"{dtype} {width}"
    for kind, lengths in LENGTHS.items():
        case = on_gpu(make_case(lengths, **sizes))
        expected = oracle(case, width**-0.5, True)
        for length in (1, 2):
            compare(f"{name} {kind} L={length}", case, expected, length, PLAIN[dtype], packed=kind == "pack")
    # fp16 ends at 6e-5: with strong decay dinitial_state is 1e-26, and nothing of it is left in the walk's operands.
    floors = {n: float(torch.finfo(getattr(torch, dtype)).tiny * size(x)) for n, x in expected.items()}
    cut(1)
    case = on_gpu(make_case(LENGTHS["pack"], **sizes))
    packed = run_front(case)
    modes = ("full", "light", "light", "full", "light")
    runs = [(f"run {i}", run_front(case, save_mode=mode)) for i, mode in enumerate(modes)]
    configs.SPANS = TINY_SPANS
    runs += [("spans", run_front(case)), ("spans again", run_front(case))]
    configs.SPANS = PINNED_SPANS
    say_bits(f"{name} runs, save modes, spans", [(what, n) for what, r in runs for n in NAMES if differ(r, packed, n)])
    wrong = []
    for n, bounds in enumerate(pairwise(case.boundaries)):
        if bounds[1] > bounds[0]:
            wrong += unequal(packed, run_front(one(case, n), packed=n % 2 == 0), bounds, n)
    say_bits(f"{name} packed = alone", wrong)
    silent(name, case)
    for mode in MODES:
        case = on_gpu(make_case((330, 65), mode=mode, **sizes))
        compare(f"{name} {mode}", case, oracle(case, width**-0.5, True), 1, STRESS[dtype], floors=floors)
    for l2norm in (True, False):
        case = on_gpu(decaying(make_case((500, 65), **sizes), l2norm))
        true = oracle(case, width**-0.5, l2norm)
        compare(
            f"{name} windows, {'normed' if l2norm else 'long'} keys",
            case,
            true,
            2,
            STRESS[dtype],
            floors=floors,
            l2norm=l2norm,
        )
    if width == 128:
        long_documents(name, sizes)


def differ(a: dict, b: dict, name: str) -> bool:
    return not torch.equal(a[name], b[name])


def size(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().mean().sqrt()


def decaying(case: Case, l2norm: bool) -> Case:
    """Heads in turn: no decay; windows of a chunk; a reset in the middle of a piece of two chunks, and none after it.
    Without l2norm keys are of length 1.2, so that beta = 2 makes states grow unless they decay."""
    g, beta = case.g, case.beta
    g[..., 0::3], g[..., 1::3], g[..., 2::3] = -0.001, -2.5, -0.01
    g[:, 128 + 40, 2::3] = -1e4
    beta[..., 1::3] = 2.0
    if l2norm:
        return case
    k = 1.2 * torch.nn.functional.normalize(case.k.float(), dim=-1)
    return case._replace(k=k.to(case.k.dtype))


def compare(
    label: str, case: Case, expected: dict, length: int, budgets: tuple, packed: bool = True,
    floors: dict | None = None, l2norm: bool = True,
) -> None:  # fmt: skip
    cut(length)
    actual = run_front(case, packed=packed, use_qk_l2norm=l2norm)
    scales = {n: max(size(expected[n]).item(), floors[n] if floors else 1e-30) for n in NAMES}
    errors = {n: size(actual[n].double() - expected[n]).item() / scales[n] for n in NAMES}
    errors = {n: error / budgets[n in ("dg", "dbeta")] for n, error in errors.items()}
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    say(label, worst, errors[worst] if errors[worst] == errors[worst] else 99.0)


def silent(name: str, case: Case) -> None:
    """No synchronising call, boundaries being on the device."""
    boundaries = torch.tensor(case.boundaries, device="cuda")
    run_front(case, cu_seqlens=boundaries)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    run_front(case, cu_seqlens=boundaries)
    torch.cuda.set_sync_debug_mode("default")
    say(f"{name} no synchronising call", "calls", 0.0)


def long_documents(name: str, sizes: dict) -> None:
    """With the pinned L: documents in a pack and alone, in one span and in several; against the documents whole."""
    case = on_gpu(make_case((9000, 100, 17000), **sizes))
    cut(0)
    whole = run_front(case)
    cut(None)
    packed = run_front(case)
    configs.FAINT = float("inf")
    mapped = run_front(case)
    configs.FAINT = PINNED_FAINT
    errors = {n: relative_rms(packed[n], mapped[n].double()) for n in NAMES}
    worst = max(errors, key=errors.get)
    say(f"{name} long: windows and maps", worst, errors[worst] / 1e-5)
    wrong = [n for n in NAMES if differ(run_front(case, save_mode="full"), packed, n)]
    configs.SPANS = PINNED_SPANS._replace(alone_bytes=64 << 20, span_bytes=32 << 20)
    wrong += [n for n in NAMES if differ(run_front(case), packed, n)]
    configs.SPANS = PINNED_SPANS
    for n, bounds in enumerate(pairwise(case.boundaries)):
        wrong += unequal(packed, run_front(one(case, n)), bounds, n)
    say_bits(f"{name} long: packed = alone, save modes, spans", wrong)
    errors = {n: relative_rms(packed[n], whole[n].double()) for n in NAMES}
    worst = max(errors, key=errors.get)
    # Two bf16 walks differ by sqrt(2) of their errors; the states between pieces are no less exact than a walk's.
    say(f"{name} long: pieces and whole", worst, errors[worst] / (2 * PLAIN[name.split()[0]][1]))


def inputs(lengths: tuple[int, ...], H: int, HV: int) -> tuple[list[torch.Tensor], torch.Tensor, object]:
    torch.manual_seed(0)
    T, bf16 = sum(lengths), {"device": "cuda", "dtype": torch.bfloat16}
    leaves = [torch.randn(1, T, n, 128, **bf16) for n in (H, H, HV)]
    gates = [torch.randn(1, T, HV, device="cuda") for _ in range(2)]
    leaves += [torch.nn.functional.logsigmoid(gates[0]) / 4, gates[1].sigmoid()]
    bounds = torch.tensor(tuple(accumulate(lengths, initial=0)), device="cuda")
    return [x.requires_grad_() for x in leaves], torch.randn(1, T, HV, 128, **bf16), ple_gdn.prepare_varlen(bounds)


def once(call: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def kernels(call: Callable[[], object], pieces: bool) -> dict[str, float]:
    """Milliseconds by role: walks of one kernel are told apart by their order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    out: dict[str, float] = {}
    seen: dict[str, int] = {}
    for event in sorted(found, key=lambda e: e.time_range.start):
        name = event.name.removeprefix("hopper_").removesuffix("_kernel")
        seen[name] = seen.get(name, -1) + 1
        if name == "forward":
            name = "replay" if "adjoint" in seen else "summaries" if pieces and not seen[name] else "walk"
        elif name == "adjoint" and pieces and not seen[name]:
            name = "adjoint summaries"
        elif "kernel" in name or "mem" in name.lower():
            name = "torch"
        out[name] = out.get(name, 0.0) + event.time_range.elapsed_us() / 1e3
    return {name: round(ms, 3) for name, ms in out.items()}


def clock(repeats: int = 7) -> None:
    deadline = time.monotonic() + TIME_SECONDS
    for shape, (lengths, H, HV, counts) in SHAPES.items():
        leaves, do, packing = inputs(lengths, H, HV)
        forward = lambda x=leaves, p=packing: ple_gdn.gated_delta_rule(*x, use_qk_l2norm=True, cu_seqlens=p)[0]  # noqa: E731
        both = lambda f=forward, x=leaves, d=do: torch.autograd.grad(f(), x, d)  # noqa: E731
        times: dict[int, tuple[list, list]] = {length: ([], []) for length in counts}
        for _ in range(repeats):
            for length, pair in times.items():
                cut(length)
                for call, values in zip((forward, both), pair, strict=True):
                    values.append(once(call))
        cut(None)
        pinned = configs.piece_length(sum(lengths), 2, HV, 128, 128) or 0
        for length, pair in times.items():
            cut(length)
            row = {"L": length, "pinned": length == pinned}
            row["ms"] = [sorted(values[2:])[len(values[2:]) // 2] for values in pair]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both()
            row["mib"] = (torch.cuda.max_memory_allocated() - before) >> 20
            row["forward"] = kernels(forward, bool(length))
            o = forward()
            row["backward"] = kernels(lambda: torch.autograd.grad(o, leaves, do), bool(length))  # noqa: B023
            print(json.dumps({f"{shape} L={length}": row}), flush=True)
        if time.monotonic() > deadline:
            break
    variants()


def variants() -> None:
    """At the pack, with the pinned L: no windows, then maps of 24 bits too; chains by one or two on a multiprocessor,
    other spans."""
    from ple_gdn.ops.gated_delta_rule import hopper_walks, repeats

    lengths, H, HV, _ = SHAPES["pack (2, 6)"]
    leaves, do, packing = inputs(lengths, H, HV)
    cut(None)
    stages, terms = hopper_walks.stages, configs.MAP_TERMS
    forward = lambda: ple_gdn.gated_delta_rule(*leaves, use_qk_l2norm=True, cu_seqlens=packing)[0]  # noqa: E731
    spans = {"one span": 1 << 40, "spans of 11": 400 << 20, "spans of 33": 1200 << 20}
    for name in ("as pinned", "no windows", "three terms", "all alone", "all shared", *spans):
        repeats.forget()
        configs.MAP_TERMS = 3 if name == "three terms" else terms
        hopper_walks.stages = {"all alone": lambda _: stages(1), "all shared": lambda _: stages(999)}.get(name, stages)
        configs.FAINT = float("inf") if name in ("no windows", "three terms") else PINNED_FAINT
        configs.SPANS = PINNED_SPANS._replace(alone_bytes=spans.get(name, PINNED_SPANS.alone_bytes))
        torch.autograd.grad(forward(), leaves, do)
        row = {"L": 0, "pinned": False, "forward": kernels(forward, True), "mib": 0}
        o = forward()
        row["backward"] = kernels(lambda: torch.autograd.grad(o, leaves, do), True)  # noqa: B023
        times = [once(lambda: torch.autograd.grad(forward(), leaves, do)) for _ in range(5)]
        row["ms"] = [once(forward), sorted(times)[2]]
        print(json.dumps({name: row}), flush=True)


def start(*worker: str) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", *worker]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, deadline: float) -> dict:
    try:
        out, err = process.communicate(timeout=max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += "\nout of time"
    rows: dict = {}
    for line in out.splitlines():
        if line.startswith("{"):
            rows.update(json.loads(line))
    if process.returncode:
        rows["failed " + " ".join(process.args[3:])] = err.strip()[-1500:]
    return rows


def report(checks: dict, times: dict) -> None:
    print("worst error over its budget (1.00 = at the budget)")
    for case, found in checks.items():
        failed = isinstance(found, str)
        print(
            f"  {case}: {found}" if failed else f"  {case:55s} {found[1]:.2f} {found[0]}{'!' if found[1] > 1 else ''}"
        )
    print("ms forward, ms forward and backward, MiB over the inputs; kernels of the forward | of the backward")
    for case, row in times.items():
        if isinstance(row, str):
            print(f"  {case}: {row}")
            continue
        parts = ("  ".join(f"{n} {ms:.3f}" for n, ms in row[p].items() if ms >= 0.01) for p in ("forward", "backward"))
        star = "*" if row["pinned"] else " "
        print(f"  {case:24s}{star} {row['ms'][0]:7.3f} {row['ms'][1]:7.3f} {row['mib']:6d}  " + "  |  ".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=("checks", "times"))
    parser.add_argument("--worker", nargs="+")
    args = parser.parse_args()
    if args.worker:
        return clock() if args.worker[0] == "clock" else check(args.worker[1], int(args.worker[2]))
    checks: dict = {}
    times: dict = {}
    if args.part != "times":
        deadline = time.monotonic() + CHECK_SECONDS
        for process in [start("check", dtype, str(width)) for dtype, width in CLASSES]:
            checks |= finish(process, deadline)
    if args.part != "checks":
        times = finish(start("clock"), time.monotonic() + TIME_SECONDS + 60)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "pieces_h200.json").write_text(json.dumps({"checks": checks, "times": times}, indent=1))
    report(checks, times)


if __name__ == "__main__":
    main()
