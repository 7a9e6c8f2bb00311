"""Loads a script of the repository as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    beside = str((ROOT / path).parent)
    sys.path.insert(0, beside)  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(beside)
    return module
