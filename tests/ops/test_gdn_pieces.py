"""Pieces of documents that are walked from their last chunks alone: interpreted against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("part", ["quick", pytest.param("slow", marks=pytest.mark.slow)])
def test_windows_are_those_of_the_host_and_what_they_leave_out_is_nothing(part: str) -> None:
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("gdn_pieces_worker.py")), part],
        capture_output=True, text=True, timeout=600, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(run.stdout.splitlines()[-1])
    for case in ("normed",) if part == "quick" else ("long keys",):
        for name, error in results[case].items():
            assert error < 1e-5, (case, name)
    if part == "quick":  # with windows of e^-1 both walks show what they leave out
        loud = results["e^-1"]
        assert min(loud["o 0"], loud["dk"], loud["dv 0"], loud["dbeta 0"]) > 1e-4
