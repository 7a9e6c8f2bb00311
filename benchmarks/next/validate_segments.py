"""One command on a GPU, 2 to 3 minutes: documents cut into P segments on the device (device_segments.patch).

    python benchmarks/next/validate_segments.py [--out DIRECTORY]

Checks P = 1, 2, 3, 5 against the float64 token recurrence (bf16 and fp32; empty and one-token documents, a batch
without boundaries), equal bits of five runs and of the kept and replayed tapes, no synchronising call; meanwhile the
kernels to be timed are compiled. Then times shapes of few heads by P, where P = 1 is the path of `main` and `*` marks
the P that the decision function takes. The tables come last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import validate_gdn

VARIANTS = {"segments": ("device_segments",)}
COUNTS = (1, 2, 3, 5)
LENGTHS = {"pack": (330, 0, 1, 64, 65, 700), "unpacked": (450,)}
PACK = tuple(accumulate((40961, 3000, 65000, 17, 9000, 120000, 24009), initial=0))
SHAPES = (
    ("pack (2,6)", PACK, 2, 6, (1, 2, 3, 5, 8, 11)),
    ("1x32768 (2,6)", (0, 32768), 2, 6, (1, 2, 3, 5, 8, 11)),
    ("1x32768 (8,16)", (0, 32768), 8, 16, (1, 2, 3, 4)),
    ("1x32768 (16,32)", (0, 32768), 16, 32, (1, 2, 4)),
)
CHECK_SECONDS, CLOCK_SECONDS = 240, 180  # compiling the fp32 prep kernel takes 10 to 30 s, and there are two of them


def force(P: int | None) -> None:
    """The launchers cut every document into P segments; None: as the decision function says."""
    from ple_gdn.ops.gated_delta_rule import configs, launch, workspace

    launch.segment_count = workspace.segment_count = configs.segment_count if P is None else lambda *_: P


def check(dtype: str, device: str = "cuda") -> None:
    """Worst error over budget of every case, one JSON line each."""
    import torch
    from oracles.gdn import NAMES, Case, make_case, oracle, relative_rms, run_front

    sizes = {"heads": 2, "value_heads": 6, "key_width": 128, "value_width": 128}
    budgets = validate_gdn.PLAIN[dtype]
    for kind, lengths in LENGTHS.items():
        packed = kind == "pack"
        case = make_case(lengths, dtype=getattr(torch, dtype), **sizes)
        case = Case(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in case))
        expected = oracle(case, 128**-0.5, True)
        for P in COUNTS:
            force(P)
            actual = run_front(case, packed=packed)
            errors = {n: relative_rms(actual[n], expected[n]) / budgets[n in ("dg", "dbeta")] for n in NAMES}
            worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
            print(json.dumps({f"{kind} {dtype} P={P}": [worst, round(errors[worst], 3)]}), flush=True)
        runs = (run_front(case, packed=packed, save_mode=mode) for mode in ("full", "light") * 2)
        same = all(torch.equal(run[n], actual[n]) for run in runs for n in NAMES)
        print(json.dumps({f"{kind} {dtype}: five runs, kept = replayed": ["bits", 0.0 if same else 99.0]}), flush=True)
    if device == "cuda":
        force(5)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        leaves = [x.detach().requires_grad_() for x in case[:5]]
        import ple_gdn

        o, _ = ple_gdn.gated_delta_rule(*leaves, use_qk_l2norm=True)
        torch.autograd.grad(o, leaves, case.do)
        torch.cuda.set_sync_debug_mode("default")
        print(json.dumps({f"{dtype}: no synchronising call": ["calls", 0.0]}), flush=True)


def clock(shapes: tuple = SHAPES, repeats: int = 9) -> None:
    """Milliseconds of forward and of forward and backward by shape and P, and the P that would be taken."""
    import torch

    import ple_gdn
    from ple_gdn.ops.gated_delta_rule.configs import segment_count

    for name, bounds, H, HV, counts in shapes:
        torch.manual_seed(0)
        T, bf16 = bounds[-1], {"device": "cuda", "dtype": torch.bfloat16}
        leaves = [torch.randn(1, T, n, 128, **bf16) for n in (H, H, HV)]
        gates = (torch.randn(1, T, HV, device="cuda") for _ in range(2))
        leaves += [torch.nn.functional.logsigmoid(next(gates)) / 4, next(gates).sigmoid()]
        leaves, do = [x.requires_grad_() for x in leaves], torch.randn(1, T, HV, 128, **bf16)
        packing = ple_gdn.prepare_varlen(torch.tensor(bounds, device="cuda"))

        def forward(leaves: list = leaves, packing: object = packing) -> torch.Tensor:
            return ple_gdn.gated_delta_rule(*leaves, use_qk_l2norm=True, cu_seqlens=packing)[0]

        def both(leaves: list = leaves, do: torch.Tensor = do, forward: object = forward) -> tuple:
            return torch.autograd.grad(forward(), leaves, do)

        times: dict[int, tuple[list, list]] = {P: ([], []) for P in counts}
        for repeat in range(repeats):
            for P in counts:
                force(P)
                for call, values in zip((forward, both), times[P], strict=True):
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    torch.cuda._sleep(4_000_000)
                    start.record()
                    call()
                    stop.record()
                    stop.synchronize()
                    if repeat >= min(2, repeats - 1):
                        values.append(start.elapsed_time(stop))
        medians = {str(P): [sorted(values)[len(values) // 2] for values in pair] for P, pair in times.items()}
        documents = len(bounds) - 1
        taken = segment_count(documents, T // 64 + documents, HV, 2)
        print(json.dumps({name: {"taken": taken, "ms": medians}}), flush=True)


def report(checks: dict, times: dict) -> None:
    print("worst error over its budget (1.00 = at the budget)")
    for case, found in checks.items():
        if case == "failed":
            print(f"  FAILED {found}")
        else:
            print(f"  {case:46s} {found[1]:.2f} {found[0]}{'' if found[1] <= 1 else '!'}")
    print("ms by P: forward / forward and backward")
    for shape, row in times.items():
        if shape == "failed":
            print(f"  FAILED {row}")
            continue
        cells = (f"{P}{'*' if int(P) == row['taken'] else ''}: {f:.3f} / {b:.3f}" for P, (f, b) in row["ms"].items())
        print(f"  {shape:16s} " + "   ".join(cells))


def compile_shape(index: int) -> None:
    """The kernels of a shape, on few tokens: none is specialised to their number."""
    name, _, H, HV, _ = SHAPES[index]
    clock(((name, (0, 300), H, HV, (1, 3)),), repeats=1)


def start(copy: Path, *worker: str) -> subprocess.Popen:
    code = "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]; import runpy; sys.argv = sys.argv[3:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(copy / "site"), str(copy / "tests"), str(Path(__file__).resolve())]
    command += ["--worker", *worker]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs="+")
    args = parser.parse_args()
    if args.worker:
        kind, *rest = args.worker
        return check(*rest) if kind == "check" else clock() if kind == "clock" else compile_shape(int(rest[0]))
    with tempfile.TemporaryDirectory() as folder:
        copy = validate_gdn.build("segments", VARIANTS["segments"], Path(folder))
        deadline = time.monotonic() + CHECK_SECONDS
        compiling = [start(copy, "compile", str(i)) for i in (0, 2, 3)]  # 0 and 1 are one geometry
        checking = [start(copy, "check", dtype) for dtype in ("bfloat16", "float32")]
        checks: dict = {}
        for process in checking:
            found = validate_gdn.finish(process, deadline)
            checks["failed"] = "\n".join(filter(None, (checks.get("failed"), found.pop("failed", None))))
            checks.update(found)
        if not checks["failed"]:
            del checks["failed"]
        for process in compiling:
            validate_gdn.finish(process, deadline)
        times = validate_gdn.finish(start(copy, "clock"), time.monotonic() + CLOCK_SECONDS)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "validate_segments.json").write_text(json.dumps({"checks": checks, "times": times}, indent=1))
    report(checks, times)


if __name__ == "__main__":
    main()
