"""One command on a GPU, 8 minutes at most: is each patch of this folder right, and is it faster?

    python benchmarks/next/validate_gdn.py [--out DIRECTORY] [--only VARIANT ...]

Each variant is this repository with some patches applied, in a folder of its own. First all variants are checked at the
same time in processes of their own: every pinned configuration of the gated delta rule that their patches touch,
against the float64 token recurrence, adversarial gates and keys, equal bits of ten runs, tapes kept and replayed.
Variants with new synchronisation begin with one small case, and are dropped if it fails or hangs. Then one variant
after the other is timed. The table comes last; a `!` marks an error over its budget.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEXT = Path(__file__).parent
VARIANTS: dict[str, tuple[str, ...]] = {"main": ()}
# Variants that change Hopper kernels alone: fewer classes to check, after one small case that may hang.
HOPPER: tuple[str, ...] = ()
SMOKE_SECONDS, CHECK_SECONDS, TIME_SECONDS = 70, 185, 40
# (dtype, K, V): every row of configs.TABLE, and widths that are padded.
CLASSES = (
    *(("bfloat16", w, w) for w in (128, 16, 32, 64, 256)),
    *(("float32", w, w) for w in (16, 32, 64, 128, 256)),
    *(("float16", w, w) for w in (64, 128, 256)),
    *(("bfloat16", k, v) for k, v in ((48, 80), (192, 96), (128, 64))),
)
# What the Hopper kernels take, and one neighbour that only the operand kernel takes.
HOPPER_CLASSES = (("bfloat16", 128, 128), ("float16", 128, 128), ("bfloat16", 128, 64))
MODES = (
    *("no_decay", "strong_decay", "beta_two", "beta_zero", "zero_keys", "one_reset"),
    *("equal_keys", "nearer_equal_keys", "near_equal_keys"),
)
LENGTHS = {
    "plain": (130, 0, 1, 64, 65, 63, 127),
    "many_chains": (130, 0, 1, 64, 65, 63, 127, 2, 200, 0, 70, 96),
    "unpacked": (321,),
    "many_items": (1,) * 20 + (130, 0, 65, 64),
    "no_norm": (130, 65),
    "one_to_a_head": (130, 0, 1, 64, 65),
    "two_to_a_head": (130, 0, 1, 64, 65),
    "five_to_a_head": (130, 0, 1, 64, 65),
    "pieces": (64 * 64 + 200, 65),
    "pieces_no_norm": (64 * 64 + 200, 65),
}
# Value heads, where not 6 of two q/k heads: the operand kernel takes four of a group at once, and from 132 (chunk, q/k
# head) pairs on the CTAs of the gradient kernel take several each.
VALUE_HEADS = {"many_items": 48, "no_norm": 6, "one_to_a_head": 2, "two_to_a_head": 4, "five_to_a_head": 10}
VALUE_HEADS |= {"pieces": 6, "pieces_no_norm": 6}  # few enough for documents in pieces
PLAIN = {"bfloat16": (4e-3, 5e-3), "float16": (2e-3, 2e-3), "float32": (1e-5, 1e-5)}
STRESS = {"bfloat16": (7e-3, 8e-3), "float32": (1e-4, 1e-3)}
HOST_TOKENS = 64
SHAPES = (("1x32768", 1, 32768, 16, 48), ("8x4096", 8, 4096, 16, 48), ("1x8192", 1, 8192, 16, 48))
SHAPES += (("pack", 1, 261987, 2, 6),)
DOCUMENTS = (40961, 3000, 65000, 17, 9000, 120000, 24009)


def build(name: str, patches: tuple[str, ...], base: Path) -> Path:
    """A patched copy with an importable `ple_gdn` in `site`."""
    copy = base / name
    folders = ("ple_gdn", "ops", "lowerings", "fx_passes", "tests", "benchmarks")
    for folder in folders:
        shutil.copytree(ROOT / folder, copy / folder)
    for patch in patches:
        with (NEXT / f"{patch}.patch").open("rb") as file:
            subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=copy, stdin=file, check=True)
    package = copy / "site" / "ple_gdn"
    shutil.copytree(copy / "ple_gdn", package)
    for folder in folders[1:4]:
        shutil.copytree(copy / folder, package / folder)
    return copy


def start(copy: Path, *arguments: str) -> subprocess.Popen:
    code = "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]; import runpy; sys.argv = sys.argv[3:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(copy / "site"), str(copy / "tests"), str(Path(__file__).resolve())]
    return subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, deadline: float) -> dict[str, object]:
    """Last line of its output as JSON; what it had printed, where it failed or ran out of time."""
    try:
        out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += "\nout of time"
    lines = [line for line in out.splitlines() if line.startswith("{")]
    result = {}
    for line in lines:
        result.update(json.loads(line))
    if process.returncode != 0:
        result["failed"] = err.strip()[-600:]
    return result


def smoke() -> None:
    """One small case, to its end."""
    import torch
    from oracles.gdn import Case, make_case, run_front

    case = make_case((130, 0, 65), dtype=torch.bfloat16, heads=1, value_heads=2, key_width=128, value_width=128)
    out = run_front(Case(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in case)))
    torch.cuda.synchronize()
    assert all(value.isfinite().all() for value in out.values())


def check(part: int, parts: int, hopper: bool) -> None:
    """Worst error over budget of every case of this part, one JSON line each."""
    import torch
    from oracles.gdn import NAMES, Case, make_case, oracle, relative_rms, run_front

    work = [("plain", *each) for each in (HOPPER_CLASSES if hopper else CLASSES)]
    work += [(mode, dtype, 128, 128) for mode in MODES for dtype in STRESS if dtype == "bfloat16" or not hopper]
    # More chains than multiprocessors take other tile rings; a batch without boundaries other addresses.
    work += [(mode, "bfloat16", 128, 128) for mode in ("many_chains", "unpacked", *VALUE_HEADS)]
    for mode, dtype, K, V in work[part::parts]:
        benign = mode in LENGTHS
        lengths = LENGTHS.get(mode, (200, 65))
        kind = {} if mode == "plain" else {"mode": mode}
        heads = 16 if mode == "many_items" else 2
        sizes = {"heads": heads, "value_heads": VALUE_HEADS.get(mode, 6), "key_width": K, "value_width": V}
        case = make_case(lengths, dtype=getattr(torch, dtype), **kind, **sizes)
        case = Case(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in case))
        norm = not mode.endswith("no_norm")
        if not norm:
            case = case._replace(k=torch.nn.functional.normalize(case.k.float(), dim=-1).to(case.k.dtype))
        budgets = (PLAIN if benign else STRESS)[dtype]
        expected = oracle(case, K**-0.5, norm)
        actual = run_front(case, packed=mode != "unpacked", use_qk_l2norm=norm)
        errors = {}
        for name in NAMES:
            scale = expected[name].square().mean().sqrt().item()
            error = relative_rms(actual[name], expected[name]) * (scale if scale < 1e-12 else 1.0)
            errors[name] = error / budgets[name in ("dg", "dbeta")]
        worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
        digest = hashlib.sha256(
            b"".join(actual[n].cpu().contiguous().view(torch.uint8).numpy().tobytes() for n in NAMES)
        )
        found = [worst, round(errors[worst], 3), digest.hexdigest()]
        print(json.dumps({f"{mode} {dtype} {K}x{V}": found}), flush=True)
        if mode == "plain" and (dtype, K) in (("bfloat16", 128), ("float32", 64)):
            same = all(
                torch.equal(value, actual[name])
                for i in range(10)
                for name, value in run_front(case, save_mode="full" if i % 2 else "light").items()
            )
            print(json.dumps({f"ten runs, kept = replayed {dtype} {K}": ["bits", 0.0 if same else 99.0]}), flush=True)


def clock() -> None:
    """Milliseconds of forward, of forward and backward, of each kernel, and the peak, by shape; the host's alone."""
    import torch

    import ple_gdn

    def median(call: object, repeats: int = 15) -> float:
        for _ in range(3):
            call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for first, last in events:
            first.record()
            call()
            last.record()
        torch.cuda.synchronize()
        return sorted(first.elapsed_time(last) for first, last in events)[repeats // 2]

    def host(call: object, repeats: int = 300) -> float:
        """Of calls whose kernels are shorter than they are."""
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        spent = time.perf_counter() - began
        torch.cuda.synchronize()
        return spent / repeats * 1e3

    for name, B, T, H, HV in (("host", 1, HOST_TOKENS, 16, 48), *SHAPES):
        torch.manual_seed(0)
        unit = lambda: torch.nn.functional.normalize(torch.randn(B, T, H, 128, device="cuda"), dim=-1)  # noqa: B023, E731
        q, k = unit().bfloat16().requires_grad_(), unit().bfloat16().requires_grad_()
        v = torch.randn(B, T, HV, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        g = (torch.nn.functional.logsigmoid(torch.randn(B, T, HV, device="cuda")) / 4).requires_grad_()
        beta = torch.sigmoid(torch.randn(B, T, HV, device="cuda")).requires_grad_()
        leaves, do = (q, k, v, g, beta), torch.randn_like(v)
        cu = torch.tensor([0, *accumulate(DOCUMENTS)], device="cuda") if name == "pack" else None
        forward = lambda: ple_gdn.gated_delta_rule(*leaves, cu_seqlens=cu)[0]  # noqa: B023, E731
        both = lambda: torch.autograd.grad(forward(), leaves, do)  # noqa: B023, E731
        if T == HOST_TOKENS:
            print(json.dumps({"host": {"forward": host(forward), "both": host(both)}}), flush=True)
            continue
        row = {"forward": median(forward), "both": median(both)}
        torch.cuda.reset_peak_memory_stats()
        both()
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        for part, call in (("kernels", both), ("forward_kernels", forward)):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                call()
                torch.cuda.synchronize()
            row[part] = {e.key: e.device_time_total / 1e3 for e in profile.key_averages() if "_kernel" in e.key}
        print(json.dumps({name: row}), flush=True)


def report(checks: dict[str, dict], times: dict[str, dict]) -> None:
    print("\nworst error over its budget (1.00 = at the budget; =: every bit of main's)")
    first = checks.get("main", {})
    for case in dict.fromkeys(key for found in checks.values() for key in found if key != "failed"):
        cells = []
        for name, found in checks.items():
            worst, ratio, *bits = found.get(case, ["-", float("nan")])
            same = bits and found is not first and bits == first.get(case, ())[2:]
            cells.append(f"{name} {ratio:.2f} {worst}{'' if ratio <= 1 else '!'}{' =' if same else ''}")
        print(f"  {case:34s} " + "   ".join(cells))
    for name, found in {**checks, **{f"{n} (times)": t for n, t in times.items()}}.items():
        if "failed" in found:
            print(f"FAILED {name}: {found['failed']}")
    for name, found in times.items():
        if "host" in found:
            print(f"host ms a call, {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in found["host"].items()))
    print("\nms: forward, forward and backward, peak MiB; kernels")
    for shape, *_ in SHAPES:
        for name, found in times.items():
            row = found.get(shape)
            if row:
                kernels = "  ".join(
                    f"{k.removesuffix('_kernel')} {v:.3f}" for k, v in row["kernels"].items() if v > 0.02
                )
                totals = f"{row['forward']:6.3f} {row['both']:6.3f} {row['peak_mib']:6.0f}"
                # Both directions launch the operand kernel, the backward one its short form.
                operands = row["forward_kernels"].get("hopper_operands_kernel")
                kernels += f"  (operands of the forward {operands:.3f})" if operands else ""
                print(f"  {shape:8s} {name:22s} {totals}  {kernels}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--worker", nargs="+")
    args = parser.parse_args()
    if args.worker:
        numbers = map(int, args.worker[1:])
        return {"clock": clock, "smoke": smoke, "check": check}[args.worker[0]](*numbers)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    chosen = {name: VARIANTS[name] for name in args.only or VARIANTS}
    chosen = {n: patches for n, patches in chosen.items() if all((NEXT / f"{p}.patch").exists() for p in patches)}
    with tempfile.TemporaryDirectory() as folder:
        copies = {name: build(name, patches, Path(folder)) for name, patches in chosen.items()}
        hopper = [name for name in copies if name in HOPPER]
        deadline = time.monotonic() + CHECK_SECONDS

        def begin(name: str, parts: int) -> list[subprocess.Popen]:
            numbers = [(str(i), str(parts), str(int(name in hopper))) for i in range(parts)]
            return [start(copies[name], "--worker", "check", *each) for each in numbers]

        # Compiling is most of it, one core each: of 16 cores some are left for the calls' own threads.
        running = {name: begin(name, max(3, 12 // len(copies))) for name in copies if name not in hopper}
        first = {name: start(copies[name], "--worker", "smoke") for name in hopper}
        checks = {name: finish(process, deadline - CHECK_SECONDS + SMOKE_SECONDS) for name, process in first.items()}
        copies = {name: copy for name, copy in copies.items() if "failed" not in checks.get(name, ())}
        running |= {name: begin(name, 2) for name in hopper if name in copies}
        for name, processes in running.items():
            checks[name] = {}
            for process in processes:
                checks[name].update(finish(process, deadline))
        times = {
            name: finish(start(copy, "--worker", "clock"), time.monotonic() + TIME_SECONDS)
            for name, copy in copies.items()
        }
    if args.out:
        (args.out / "validate_gdn.json").write_text(json.dumps({"checks": checks, "times": times}, indent=1))
    report(checks, times)


if __name__ == "__main__":
    main()
