"""The logic of benchmarks/bench_kcp.py over two gloo processes at a size the CPU can run; its bar is about two H200."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_kcp.py"


def test_every_layout_rule_and_exchange_is_checked_and_written(tmp_path: Path) -> None:
    out = tmp_path / "kcp.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--divisor", "2048", "--heads", "1", "2"]
    command += ["--width", "16", "--repeats", "1", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads(out.read_text())
    assert [len(rows) for rows in record["packs"].values()] == [18, 18]
    assert all(row["speedup"] > 0 for rows in record["packs"].values() for row in rows)
    equal, bitwise, *speedups = (holds for holds, _ in record["verdicts"].values())
    assert equal is True
    assert bitwise is True
    assert speedups == [None, None]
    assert done.stdout.count("holds") == 2
