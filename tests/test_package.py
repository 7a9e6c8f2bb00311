"""The built wheel, used as a stranger would: another directory, nothing imported, the backend called by name."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from line_coverage import MEASURED

ROOT = Path(__file__).parent.parent
SOURCES = {
    "ple_gdn": "ple_gdn",
    "ops": "ple_gdn/ops",
    "lowerings": "ple_gdn/lowerings",
    "fx_passes": "ple_gdn/fx_passes",
}

USE = """
import sys
import torch

def fn(x):
    return x.sin() * x

x = torch.randn(4, 3, requires_grad=True)
assert "ple_gdn" not in sys.modules
compiled = torch.compile(fn, backend="ple_gdn", fullgraph=True)
torch.testing.assert_close(compiled(x), fn(x))
torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))

import ple_gdn
assert torch.ops.ple_gdn.ple_gate_conv is not None
print(ple_gdn.__file__)
print(ple_gdn.ops.__file__)
print(len(ple_gdn.compile_reports()))
"""


def run(*command: object, cwd: Path) -> str:
    return subprocess.run([str(c) for c in command], cwd=cwd, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """(python, site-packages) of a new environment that holds the wheel, and sees torch in the running one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*SOURCES, "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    run(sys.executable, *build, cwd=folder)
    (wheel,) = folder.glob("*.whl")

    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # A path file and not --system-site-packages, which skips the environment that this one was made from. The path
    # files of a folder named in a path file are not read, so an editable ple_gdn there stays out of sight.
    above = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "parent.pth").write_text("\n".join(above) + "\n")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    return python, site_packages


def test_the_wheel_compiles_a_function_by_backend_name_from_another_directory(installed, tmp_path):
    python, site_packages = installed
    script = tmp_path / "use.py"
    script.write_text(USE)
    package, ops, graphs = run(python, script, cwd=tmp_path).splitlines()[-3:]
    assert Path(package) == site_packages / "ple_gdn/__init__.py"
    assert Path(ops) == site_packages / "ple_gdn/ops/__init__.py"
    assert graphs == "1"


def test_the_wheel_holds_every_source_file(installed):
    _, site_packages = installed
    for source, package in SOURCES.items():
        files = {p.relative_to(ROOT / source) for p in (ROOT / source).rglob("*") if p.is_file()}
        expected = {p for p in files if "__pycache__" not in p.parts}
        nested = set(SOURCES) - {source} if source == "ple_gdn" else set()
        found = {p.relative_to(site_packages / package) for p in (site_packages / package).rglob("*") if p.is_file()}
        found = {p for p in found if "__pycache__" not in p.parts and p.parts[0] not in nested}
        assert found == expected, source


IMPORT_ONLY = """
import sys
import torch
from torch import nn
before = dict(vars(nn.Module)), torch.compile, torch.nn.functional.silu
import ple_gdn
assert (dict(vars(nn.Module)), torch.compile, torch.nn.functional.silu) == before
assert not torch.cuda.is_initialized()
for name in ("triton", "transformers", "ple_gdn.backend", "torch._inductor.compile_fx"):
    assert name not in sys.modules, name
assert all(hasattr(ple_gdn, name) for name in ple_gdn.__all__)
"""


def test_importing_patches_nothing_touches_no_gpu_and_loads_no_compiler(tmp_path):
    run(sys.executable, "-c", IMPORT_ONLY, cwd=tmp_path)


def test_the_package_version_is_the_one_of_the_build():
    import ple_gdn

    assert f'version = "{ple_gdn.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_coverage_leaves_out_files_of_triton_kernels_alone():
    omitted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]["omit"]
    files = [path for pattern in omitted for path in ROOT.glob(pattern.removeprefix("*/"))]
    assert len(files) >= len(omitted)
    for path in files:
        body = ast.parse(path.read_text()).body
        kernels = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert kernels
        # A layout made for the kernels by a function of the file: it runs whole when the file is imported.
        made = " ".join(ast.unparse(n) for n in body if isinstance(n, ast.Assign))
        for kernel in kernels:
            decorators = [ast.unparse(decorator) for decorator in kernel.decorator_list] or [""]
            is_kernel = decorators[0].startswith(("triton.jit", "gluon.jit"))
            assert is_kernel or f"{kernel.name}(" in made, (path.name, kernel.name)


def test_every_measured_test_is_there():
    for prefix in MEASURED:
        path, _, name = prefix.partition("::")
        assert f"\ndef {name.partition('[')[0]}" in (ROOT / "tests" / path).read_text(), prefix


def test_a_run_below_the_required_line_coverage_fails_and_prints_the_table():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/backend/test_options.py"]
    done = subprocess.run([*command, "--line-coverage", "99"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "ple_gdn/options.py" in done.stdout
    assert "at least 99 % required" in done.stdout
    assert "passed" in done.stdout.splitlines()[-1]
