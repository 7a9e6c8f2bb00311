"""Line coverage of ops/, lowerings/, fx_passes/ and ple_gdn/ in the course of a normal run: `--line-coverage 90`.

Python's tracer makes compilation half as slow again and Triton's interpreter two to three times slower, so only the
tests of `MEASURED` run under it: chosen so that they execute nearly all of what the whole suite does. Files of Triton
kernels alone are left out (pyproject.toml). The table is printed at the end; a run below the percentage fails.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[1]

MEASURED = (
    "backend/test_backend.py::test_an_error_of_the_model_itself",
    "backend/test_explain_arguments.py",
    "backend/test_memory.py::test_a_hand_made_graph",
    "backend/test_memory.py::test_an_image_that_was_there",
    "backend/test_options.py",
    "faults/test_one_contract_on_every_path.py",
    "fx_passes/test_chunk_token_sums.py",
    "fx_passes/test_chunked_backward.py",
    "fx_passes/test_fuse_gated_residual.py",
    "fx_passes/test_fuse_grouped_rms_norm.py",
    "fx_passes/test_fuse_ple.py",
    "fx_passes/test_manager.py",
    "fx_passes/test_matching.py",
    "fx_passes/test_normalize.py",
    "fx_passes/test_record_substitutions.py",
    "fx_passes/test_rounding_boundaries.py::test_every_16_bit_code",
    "fx_passes/test_tape_reuse_regions.py::test_verdicts",
    "hf/test_packing.py::test_bad_marks",
    "hf/test_packing.py::test_boundary_marks",
    "hf/test_packing.py::test_more_documents",
    "hf/test_packing.py::test_two_and_three_documents_per_layer[False-seq_idx]",
    "hf/test_substitutions.py::test_a_call",
    "hf/test_substitutions.py::test_a_packed_call",
    "hf/test_substitutions.py::test_gates_and_states",
    "lowerings/test_cpp_casts.py",
    "ops/test_causal_conv1d.py::test_packing_refuses",
    "ops/test_causal_conv1d_kernels.py::test_interpreted",
    "ops/test_gated_delta_rule_repeats.py",
    "ops/test_gated_delta_rule_workspace.py",
    "ops/test_gated_residual_interpreted.py",
    "ops/test_kcp_bad_input.py",
    "ops/test_kcp_census.py::test_a_plan_read",
    "ops/test_kcp_interpreted.py::test_interpreted",
    "ops/test_kcp_overlap.py",
    "ops/test_kcp_planner.py",
    "ops/test_kcp_view.py",
    "ops/test_ple_bad_input.py",
    "ops/test_ple_kernels_interpreted.py::test_interpreted_kernels_match_float64[packed_masked]",
    "ops/test_ple_kernels_interpreted.py::test_interpreted_kernels_match_float64[two_taps]",
    "ops/test_saved_tensors_once.py",
    "ops/test_tape_region_kinds.py",
    "ops/test_triton_launch.py",
    "ops/test_varlen.py",
)
"""What node ids below tests/ begin with."""

# Statements that a module executes when it is imported, in a process of its own: here some were imported long before.
IMPORT_EVERYTHING = """
import importlib, pkgutil
for name in ("ple_gdn", "ple_gdn.ops", "ple_gdn.lowerings", "ple_gdn.fx_passes"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        importlib.import_module(module.name)
"""


class LineCoverage:
    """A pytest plugin: measures the tests of `measured`, prints the table, fails below `required` per cent."""

    def __init__(self, required: float, measured: tuple[str, ...]) -> None:
        self.required = required
        self.measured = tuple(f"tests/{prefix}" for prefix in measured)
        self.folder = tempfile.TemporaryDirectory()
        self.coverage = coverage.Coverage(
            data_file=f"{self.folder.name}/data", config_file=str(ROOT / "pyproject.toml")
        )
        self.table = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not item.nodeid.startswith(self.measured):
            return (yield)
        with self.coverage.collect():
            try:
                return (yield)
            finally:
                # Set by the "subprocess" patch at every start; processes of other tests must not see it.
                os.environ.pop("COVERAGE_PROCESS_CONFIG", None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        with self.coverage.collect():
            subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], cwd=self.folder.name, check=True)
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
        self.coverage.save()
        self.coverage.combine([self.folder.name])
        table = io.StringIO()
        reached = self.coverage.report(file=table)
        self.table = f"{table.getvalue()}line coverage {reached:.1f} %, at least {self.required:g} % required\n"
        if reached < self.required and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.folder.cleanup()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("line coverage")
        terminalreporter.write(self.table)
