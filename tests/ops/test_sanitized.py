"""The calls that compute-sanitizer watches on a GPU run on the CPU too."""

from __future__ import annotations

import pytest
import torch
from oracles.scripts import load_script

pytest.importorskip("triton")

script = load_script("tests/cuda/sanitized.py")


@pytest.mark.parametrize("op", script.OPS)
def test_results_are_finite_and_complete(op: str) -> None:
    torch.manual_seed(0)
    results = script.OPS[op]("cpu")
    assert len(results) >= 16
    assert all(bool(x.isfinite().all()) for x in results)
