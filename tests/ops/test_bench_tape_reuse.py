"""The logic of benchmarks/bench_tape_reuse.py at a size the CPU can run; its claims are about an H200."""

from __future__ import annotations

import argparse
import copy

import pytest
from oracles.scripts import load_script

pytestmark = pytest.mark.usefixtures("one_thread")

bench = load_script("benchmarks/bench_tape_reuse.py")
# Wide enough a SwiGLU that the open region's peak lies in it, so that the gap is the tapes to the byte.
ARGS = argparse.Namespace(device="cpu", tokens=320, width=16, inner=1024, repeats=1)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return [bench.measure(ARGS, closed, mode) for closed, mode in ((False, "light"), (False, "full"), (True, "full"))]


def test_the_gap_of_an_open_region_is_its_tapes_to_the_byte(rows: list[dict]) -> None:
    for row in rows[:2]:
        peaks = row["peak_bytes"]
        assert row["auto"] == "replay"
        assert peaks["auto"] == peaks["replay"]
        assert peaks["kept"] - peaks["replay"] == row["tape_bytes"]
        assert bench.failures(row) == []
    assert rows[2]["auto"] == "hand-off"
    assert bench.failures(rows[2]) == []


def test_broken_claims_are_reported(rows: list[dict]) -> None:
    heavy, choosing, slow = copy.deepcopy(rows)
    heavy["peak_bytes"]["kept"] += 2 * bench.MIB
    choosing["auto"] = "hand-off"
    slow["timed_on"] = "cuda"
    slow["backward_ms"].update(kept=1.0, auto=1.03)
    assert "kept - replay" in bench.failures(heavy)[0]
    assert "auto chose hand-off" in bench.failures(choosing)[0]
    assert "auto took 1.030 ms, kept 1.000" in bench.failures(slow)[0]


def test_the_pack_ends_at_the_asked_number_of_tokens() -> None:
    assert bench.boundaries(261987)[-1] == sum(bench.PACK) == 261987
    assert bench.boundaries(261987)[1:3] == [40961, 43961]
    assert bench.boundaries(640) == [0, 17, 640]
