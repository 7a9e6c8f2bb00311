"""Fuzzers without an op, for what `fuzz_runs` does with workers: each group is one case."""

from __future__ import annotations

import os
import time

import torch
from harness import Tally


def _case(tally: Tally, group: int) -> None:
    tally.cases += 1
    tally.note("toy", group / 100)


def even_groups_hang(tally: Tally, seed: int, group: int, device: torch.device) -> None:
    """As one that compiles: from the second even group on."""
    if group % 2 == 0 and group > 0:
        time.sleep(600)
    time.sleep(0.01)
    _case(tally, group)


def first_group_is_slow(tally: Tally, seed: int, group: int, device: torch.device) -> None:
    """The one error of .99 is in it."""
    time.sleep(0.5 if group == 0 else 0.05)
    tally.cases += 1
    tally.note("toy", 0.99 if group == 0 else 0.1)


def worker_ends(tally: Tally, seed: int, group: int, device: torch.device) -> None:
    """Group 2 raises, group 3 ends the process."""
    if group == 2:
        raise ValueError("toy error")
    if group == 3:
        os._exit(7)
    _case(tally, group)
