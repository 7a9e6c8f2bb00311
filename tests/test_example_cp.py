"""The context-parallel example trains like one process: 2 context ranks, and 2 x 2 with FSDP2 on the other axis."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_qwen4_cp.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, ["--layout", "contiguous"]),
        (2, ["--compile", "--exchange", "all_to_all"]),
        (4, ["--context", "2", "--layout", "zigzag_per_document"]),
    ],
)
def test_ranks_train_like_one_process(processes, options):
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(EXAMPLE), "--steps", "2", "--tokens", "320", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = re.findall(r"^ +\d +([\d.]+) +([\d.]+) ", done.stdout, re.MULTILINE)
    assert len(losses) == 2, done.stdout
    for alone, ranks in losses:
        assert abs(float(alone) - float(ranks)) <= 1e-5 * float(alone)
