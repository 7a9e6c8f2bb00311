"""The comparison with peers runs to its end where one of them works and the other does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from oracles.scripts import ROOT

WORKS = """
print("chatter on the standard output")
def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=None):
    scores = (q * k).sum(-1, keepdim=True).repeat_interleave(v.shape[2] // q.shape[2], 2)
    return (v * scores * (g.exp() * beta)[..., None]).to(v.dtype), None
"""


def test_peers_are_timed_in_turn_and_a_broken_one_is_reported(tmp_path: Path) -> None:
    for module, text in (("flash_qla", WORKS), ("fla", "raise RuntimeError('no kernel for this device')")):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(text)
    out = tmp_path / "results" / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks/bench_gated_delta_rule.py"), "--device", "cpu", "--site"]
    command += [str(tmp_path), "--peers", "flash_qla", "fla", "--shapes", "2x70 (1,3)", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    row = json.loads(out.read_text())["rows"]["2x70 (1,3)"]
    assert row["fla"] == {"failed": "exit status 1: RuntimeError: no kernel for this device"}
    for provider in ("ple_gdn", "ple_gdn l2norm", "flash_qla"):
        assert row[provider]["both"] > row[provider]["forward"] > 0
    assert row["ple_gdn l2norm"]["norms_off"] < 0.02 < row["flash_qla"]["norms_off"]
    assert row["flash_qla"]["cold_s_empty_cache"] > 0
    assert "FAILED exit status 1" in done.stdout
