"""compute-sanitizer finds nothing in the kernels of any op: memcheck and racecheck over `sanitized.py`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda

SCRIPT = Path(__file__).with_name("sanitized.py")
OPS = ("ple", "gated_delta_rule", "causal_conv1d", "gated_residual")
# Every tensor an allocation of its own: an access past its end then leaves what memcheck takes for valid.
SETTINGS = {
    "memcheck": (["--report-api-errors", "no"], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "racecheck": ([], {}),
}
CASES = [(tool, op) for tool in SETTINGS for op in OPS] + [("memcheck", "planted")]
FOUND = 9
SECONDS = 150


def _tool() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def _start(tool: str, op: str) -> subprocess.Popen:
    arguments, variables = SETTINGS[tool]
    command = [_tool(), "--tool", tool, *arguments, "--error-exitcode", str(FOUND)]
    command += ["--target-processes", "application-only", sys.executable, str(SCRIPT), op]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], subprocess.Popen]]:
    """All selected cases at once: under the tool half a minute goes by before the first kernel."""
    chosen = [item for item in request.session.items if item.path == request.path]
    cases = {item.callspec.params["case"] for item in chosen}
    processes = {case: _start(*case) for case in sorted(cases)} if _tool() else {}
    yield processes
    for process in processes.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_sanitizer_finds_what_is_planted_and_nothing_else(
    case: tuple[str, str], started: dict[tuple[str, str], subprocess.Popen]
) -> None:
    if case not in started:
        pytest.skip("compute-sanitizer is not installed")
    output, _ = started[case].communicate(timeout=SECONDS)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer: Device not supported (as under gVisor)")
    if case[1] == "planted":
        assert started[case].returncode == FOUND, output[-4000:]
        assert "Invalid __global__ read of size 4 bytes" in output, output[-4000:]
    else:
        assert started[case].returncode == 0, output[-4000:]
        assert f"{case[1]}: " in output, output[-4000:]
        assert "SUMMARY: 0 " in output, output[-4000:]
