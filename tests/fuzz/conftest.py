"""The fuzzers are scripts beside this file: `from fuzz_gdn import ...`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
