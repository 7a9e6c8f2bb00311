"""Modules of this folder are imported by name, by its tests and by the processes they start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
