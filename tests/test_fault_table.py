"""FAULTS.md: every report has a row, and every test that a row names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS / "FAULTS.md").read_text()
ROWS = dict(re.findall(r"^\| ([A-E]\d+) [^|]*\|[^|]*\|(.*)\|$", TABLE, re.M))


def functions() -> dict[str, list[str]]:
    """Names of the functions of every file below tests/."""
    trees = {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in TESTS.rglob("*.py")}
    return {
        path: [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for path, tree in trees.items()
    }


FUNCTIONS = functions()


def pattern(text: str) -> re.Pattern[str]:
    """An ellipsis stands for anything."""
    return re.compile(".*".join(map(re.escape, text.split("…"))))


def found(reference: str) -> list[str]:
    """What a file, a folder/, a file::name or a name stands for."""
    path, _, name = reference.partition("::") if "/" in reference else ("…", "", reference)
    files = [f for f in FUNCTIONS if (f.startswith(path) if path.endswith("/") else pattern(path).fullmatch(f))]
    return [n for f in files for n in FUNCTIONS[f] if pattern(name or "…").fullmatch(n)]


def test_every_report_has_a_row_and_every_test_that_it_names_exists() -> None:
    assert len(ROWS) == len(re.findall(r"^\| [A-E]\d+ ", TABLE, re.M)) == 39
    references = {report: re.findall(r"`([^`]+)`", tests) for report, tests in ROWS.items()}
    assert all(references.values())
    assert not [(report, name) for report, names in references.items() for name in names if not found(name)]
