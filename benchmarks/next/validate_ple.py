"""One command on a GPU, 4 minutes at most: are the PLE patches of this folder right, and faster? Table last.

    python benchmarks/next/validate_ple.py [--out DIRECTORY]

`pdl`: every kernel is launched while the one before it runs, and waits for it. `score_spans`: 96 rows at least.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from validate_gdn import ROOT, build

VARIANTS = {
    "main": (),
    "pdl": ("ple_pdl",),
    "score_spans": ("ple_score_spans",),
    "both": ("ple_pdl", "ple_score_spans"),
}
CASES = (("ple_gdn", 8192), ("ple_gdn", 32768), ("ple_gdn packed", 32768), ("ple_gdn", 262144))
TESTS = "match_float64 or alone or twenty or score or graph"


def start(copy: Path, script: str, *arguments: str) -> subprocess.Popen:
    code = "import sys, runpy; sys.path[:0] = sys.argv[1:3]; script = sys.argv[3]; sys.argv = sys.argv[3:]; "
    code += "sys.exit(__import__('pytest').main(sys.argv[1:])) if script == 'pytest' else "
    code += "runpy.run_path(script, run_name='__main__')"
    command = [sys.executable, "-c", code, str(copy / "site"), str(copy / "tests"), script, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=copy, bufsize=1, **pipes)


def clock(copies: dict[str, Path], case: tuple[str, int], repeats: int = 15) -> dict[str, float]:
    """Median milliseconds of forward and backward, the variants asked in turn."""
    script = str(ROOT / "benchmarks/bench_ple.py")
    workers = {n: start(c, script, "--worker", case[0], str(case[1]), "both") for n, c in copies.items()}
    times: dict[str, list[float]] = {name: [] for name in workers}
    for worker in workers.values():
        while worker.stdout.readline().strip() not in ("ready", ""):
            pass
    for _ in range(repeats):
        for name, worker in workers.items():
            if worker.poll() is None:
                worker.stdin.write("go\n")
                times[name].append(float(worker.stdout.readline() or "nan"))
    for worker in workers.values():
        worker.communicate()
    return {name: sorted(values)[len(values) // 2] if values else float("nan") for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copies = {name: build(name, patches, Path(folder)) for name, patches in VARIANTS.items()}
        tests = {n: start(c, "pytest", "-q", "-k", TESTS, "tests/cuda/test_ple_cuda.py") for n, c in copies.items()}
        checks = {}
        for name, process in tests.items():
            try:
                checks[name] = process.communicate(timeout=110)[0].strip().splitlines()[-6:]
            except subprocess.TimeoutExpired:
                process.kill()
                checks[name] = ["out of time"]
        times = {}
        for case in CASES:
            # Four processes at 262,144 tokens would not fit: 31 GB each with the gradients; two at a time do.
            names = list(copies)
            groups = [names[:2], names[2:]] if case[1] > 100_000 else [names]
            times[" ".join(map(str, case))] = {
                name: ms for group in groups for name, ms in clock({n: copies[n] for n in group}, case).items()
            }
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "validate_ple.json").write_text(json.dumps({"checks": checks, "times": times}, indent=1))
    for name, lines in checks.items():
        print(f"{name}: " + "\n  ".join(lines))
    for case, row in times.items():
        print(f"{case:24s} " + "  ".join(f"{name} {ms:.3f}" for name, ms in row.items()))


if __name__ == "__main__":
    main()
