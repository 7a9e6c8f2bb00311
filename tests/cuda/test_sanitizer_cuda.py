"""compute-sanitizer finds nothing in the kernels of any op: memcheck and racecheck over `sanitized.py`.

What racecheck shows of the warp-specialised kernels: in the orders that ran, no thread's load or store of shared
memory met another's with nothing between. It reports Triton's dispatch, which hands the partitions their numbers and
captures through shared memory; `oracles.racecheck` accepts such a report only where the machine code that ran has a
barrier of the whole CTA between the two. `planted_race` shows that this hides no race of partitions, `ordered` that an
mbarrier between them is enough. What it does not show: that an mbarrier is the right one or waited for in the right
phase, nor anything of the copy engine's copies and of products that read shared memory, which are no thread's accesses.
That is for `oracles.gluon_emulator` (`tests/ops/test_gdn_hopper*.py`): it orders partitions, copies and products by
their mbarriers and finds a missing wait, a wrong phase and a tile released too early, but takes a partition for one
actor, so that barriers within one are for racecheck. Neither sees a missing proxy fence.
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
from oracles.racecheck import unexplained

pytestmark = pytest.mark.cuda

SCRIPT = Path(__file__).with_name("sanitized.py")
OPS = ("ple", "gated_delta_rule", "causal_conv1d", "gated_residual")
# Every tensor an allocation of its own: an access past its end then leaves what memcheck takes for valid.
SETTINGS = {
    "memcheck": (["--report-api-errors", "no"], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "racecheck": (["--print-limit", "10000"], {}),
}
PLANTED = [("memcheck", "planted"), ("racecheck", "planted_race"), ("racecheck", "ordered")]
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
    left = unexplained(output, caches[case])
    if op == "planted_race":
        assert code == FOUND, said
        assert left, said
        assert all("hand_over_kernel" in line for line in left), left
    else:
        assert code in (0, FOUND), said
        assert not left, (left, said)
