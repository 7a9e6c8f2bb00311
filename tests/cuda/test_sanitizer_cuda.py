"""compute-sanitizer finds nothing in the kernels of any op: memcheck and racecheck over `sanitized.py`.

What racecheck shows of the warp-specialised kernels: in the orders that ran, no thread's load or store of shared
memory met another's of the same partition with nothing between. It does not know mbarriers, the only order between
partitions, and reports such pairs whether they are in order (`handed_over`) or not (`planted_race`).
`oracles.racecheck` therefore sets aside reports that the machine code shows to be between partitions, accepts those
with a barrier of the whole CTA between the two (Triton's `dispatch`) and refuses all else (`planted_race_within`). If
the tool learns mbarriers, `handed_over` fails: then reports between partitions are to be refused, too.

So races between partitions are held by the emulator's happens-before checks alone: `oracles.gluon_emulator` orders
partitions, copies and products by their mbarriers and finds a missing wait, a wrong phase and a tile released too
early, as its mutants in `tests/ops/test_gdn_hopper*.py` show. It takes a partition for one actor, so that barriers
within one are for racecheck alone. Neither sees a missing proxy fence.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracles.racecheck import UNDECIDABLE, judged

pytestmark = pytest.mark.cuda

SCRIPT = Path(__file__).with_name("sanitized.py")
OPS = ("ple", "gated_delta_rule", "causal_conv1d", "gated_residual")
# Every tensor an allocation of its own: an access past its end then leaves what memcheck takes for valid.
SETTINGS = {
    "memcheck": (["--report-api-errors", "no"], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "racecheck": (["--print-limit", "10000"], {}),
}
# What racecheck has to report and cannot tell apart, what it has to report rightly, and what it may not report.
BETWEEN = ("planted_race", "handed_over")
RACES = (*BETWEEN, "planted_race_within", "dispatch")
PLANTED = [("memcheck", "planted"), *(("racecheck", name) for name in RACES)]
CASES = [(tool, op) for tool in SETTINGS for op in OPS] + PLANTED
FOUND = 9
SECONDS = 240


def _tool() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def _start(tool: str, op: str, cache: Path) -> subprocess.Popen:
    """racecheck's reports are read against the cubins that ran, so these are kept by themselves."""
    arguments, variables = SETTINGS[tool]
    if tool == "racecheck":
        variables = {**variables, "TRITON_CACHE_DIR": str(cache)}
    command = [_tool(), "--tool", tool, *arguments, "--error-exitcode", str(FOUND)]
    command += ["--target-processes", "application-only", sys.executable, str(SCRIPT), op]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Triton's cache of each case."""
    return {case: tmp_path_factory.mktemp("-".join(case)) for case in CASES}


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, caches: dict[tuple[str, str], Path]
) -> Iterator[dict[tuple[str, str], subprocess.Popen]]:
    """All selected cases at once: under the tool half a minute goes by before the first kernel."""
    chosen = [item for item in request.session.items if item.path == request.path]
    cases = {item.callspec.params["case"] for item in chosen}
    processes = {case: _start(*case, caches[case]) for case in sorted(cases)} if _tool() else {}
    yield processes
    for process in processes.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_sanitizer_finds_what_is_planted_and_nothing_else(
    case: tuple[str, str], started: dict[tuple[str, str], subprocess.Popen], caches: dict[tuple[str, str], Path]
) -> None:
    if case not in started:
        pytest.skip("compute-sanitizer is not installed")
    output, _ = started[case].communicate(timeout=SECONDS)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer: Device not supported (as under gVisor)")
    tool, op = case
    code, said = started[case].returncode, output[-4000:]
    if op == "planted":
        assert code == FOUND, said
        assert "Invalid __global__ read of size 4 bytes" in output, said
        return
    assert f"{op}: " in output, said
    if tool == "memcheck":
        assert code == 0, said
        assert "SUMMARY: 0 " in output, said
        return
    refused, undecidable = judged(output, caches[case])
    assert code in (0, FOUND), said
    if op == "planted_race_within":
        assert code == FOUND, said
        assert refused, said
        assert all("swap_kernel" in line for line in refused), refused
        assert not undecidable, undecidable
        return
    assert not refused, (refused, said)
    if op in BETWEEN:
        assert code == FOUND, said
        assert undecidable, said
        assert all("hand_over_kernel" in line and line.endswith(UNDECIDABLE) for line in undecidable), undecidable
    elif op != "gated_delta_rule":  # the one op of warp-specialised kernels
        assert not undecidable, (undecidable, said)
