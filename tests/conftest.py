"""Shared switches: slow tests run with --run-slow, CUDA tests skip without a device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Oracles and shared cases live beside the tests: `from oracles.gdn import ...`.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--line-coverage", type=float, metavar="PERCENT", help="print line coverage; fail below PERCENT")


def pytest_configure(config: pytest.Config) -> None:
    required = config.getoption("--line-coverage")
    if required is not None:
        from line_coverage import MEASURED, LineCoverage  # a test dependency that other runs do not need

        config.pluginmanager.register(LineCoverage(required, MEASURED))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = pytest.mark.skip(reason="slow: run with --run-slow")
    skip_cuda = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--run-slow"):
            item.add_marker(skip_slow)
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_cuda)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of many small tensors: on a busy machine a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
