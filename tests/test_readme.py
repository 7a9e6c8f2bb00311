"""README's Python blocks run as they stand, in their order, and its snapshot example pins a graph."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
PIN = next(block for block in BLOCKS if "expecttest" in block)
RUN = """
import json, sys
names = {"__name__": "readme"}
for number, block in enumerate(json.load(sys.stdin), 1):
    exec(compile(block, f"README block {number}", "exec"), names)
    print("ran", number)
"""


def run(command: list[str], folder: Path, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        input=text,
        env={**os.environ, "OMP_NUM_THREADS": "1", **rank, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def run_blocks(blocks: list[str], folder: Path) -> None:
    done = run(["-c", RUN], folder, json.dumps(blocks))
    assert done.returncode == 0, done.stderr
    assert f"ran {len(blocks)}\n" in done.stdout
    assert "gated_residual_mix" in done.stdout  # what `print(report)` shows
    assert (folder / "tape_memory.png").stat().st_size > 5000


def test_the_blocks_without_a_model_run_in_order(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    light = [block for block in BLOCKS if "transformers" not in block]
    assert len(light) == len(BLOCKS) - 1 >= 6
    run_blocks(light, tmp_path)


@pytest.mark.slow
def test_all_blocks_run_in_order(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers.models.qwen4_exp")
    run_blocks(BLOCKS, tmp_path)


@pytest.mark.slow
def test_the_snapshot_example_writes_its_text_and_then_pins_it(tmp_path: Path) -> None:
    test = tmp_path / "test_mine.py"
    mix = re.search(r"^def mix.*?\n\n", "\n\n".join(BLOCKS), re.DOTALL | re.MULTILINE).group()
    test.write_text(f"{PIN}\n\n{mix}\n")
    run(["-m", "pytest", "-q", "-p", "no:cacheprovider", test.name], tmp_path, EXPECTTEST_ACCEPT="1")
    assert "ple_gdn.gated_residual_mix" in test.read_text()
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", test.name], tmp_path)
    assert done.returncode == 0, done.stdout
    test.write_text(test.read_text().replace(", 4,", ", 5,").replace("2, 8, 256", "2, 9, 256", 2))
    assert run(["-m", "pytest", "-q", "-p", "no:cacheprovider", test.name], tmp_path).returncode == 1
