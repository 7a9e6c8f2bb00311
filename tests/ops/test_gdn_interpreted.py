"""The Triton kernels of the gated delta rule, interpreted on the CPU in fp32, against the float64 oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_interpreted_kernels_meet_the_fp32_budget() -> None:
    worker = Path(__file__).with_name("gdn_interpreter_worker.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    output = subprocess.run(
        [sys.executable, str(worker)], env=environment, capture_output=True, text=True, check=True, timeout=600
    ).stdout
    for errors in json.loads(output.splitlines()[-1]):
        assert max(errors.values()) < 1e-5, errors
