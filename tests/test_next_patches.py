"""The patches of benchmarks/next, which wait for a GPU, apply to the code as it is, in the order they are run in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from oracles.scripts import ROOT, load_script

SCRIPTS = [f"benchmarks/next/validate_{name}.py" for name in ("ple", "gdn")]
VARIANTS = {name: patches for script in SCRIPTS for name, patches in load_script(script).VARIANTS.items()}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("variant", [name for name, patches in VARIANTS.items() if patches])
def test_the_patches_of_a_variant_apply_one_after_the_other(variant: str, tmp_path: Path) -> None:
    for folder in ("ops", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}  # inside a checkout it skips files
    for patch in VARIANTS[variant]:
        text = (ROOT / "benchmarks" / "next" / f"{patch}.patch").read_bytes()
        for arguments in ((), ("--reverse", "--check")):  # the second only passes where the first did its work
            done = subprocess.run(
                ["git", "apply", "--whitespace=nowarn", *arguments, "-"],
                cwd=tmp_path, input=text, env=environment, capture_output=True,
            )  # fmt: skip
            assert done.returncode == 0, f"{patch}: {done.stderr.decode()}"


def test_every_patch_belongs_to_a_variant() -> None:
    used = {patch for patches in VARIANTS.values() for patch in patches}
    assert {path.stem for path in (ROOT / "benchmarks" / "next").glob("*.patch")} == used
