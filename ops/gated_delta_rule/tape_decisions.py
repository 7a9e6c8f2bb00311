"""Where a gated delta rule's backward got its tapes from: the record, the eager log, and the cost of rebuilding."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ..varlen import CHUNK

# Enough for the regions of one step of the largest models.
DECISIONS_KEPT = 512


@dataclass(frozen=True)
class TapeDecision:
    """One checkpoint region's tapes: handed to the backward, replayed, or saved."""

    region: str
    verdict: str
    reason: str
    bytes_at_stake: str
    replay_cost: str


_kept: deque[TapeDecision] = deque(maxlen=DECISIONS_KEPT)
_lock = threading.Lock()


def replay_flops(q: torch.Tensor, v: torch.Tensor) -> Any:
    """FLOPs of rebuilding h and delta: HV (4 K V + 2 C V) a token for chunks of C = 64 (two products of a state, one
    of X). SymInt where a size is."""
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    return B * T * HV * (4 * K * V + 2 * CHUNK * V)


def make_decision(region: str, verdict: str, reason: str, at_stake: Any, flops: Any) -> TapeDecision:
    return TapeDecision(region, verdict, reason, f"{at_stake} bytes", f"{flops} FLOP to rebuild h and delta")


def remember(decision: TapeDecision) -> None:
    """Keeps the decision of an eager call."""
    with _lock:
        _kept.append(decision)


def tape_decisions() -> list[TapeDecision]:
    """Decisions of eager calls in checkpoint regions, oldest first (the last 512).

    One for each backward that a region was rerun for; where the forward settles it already (an argument, a torch
    release that was not verified, saved-tensor hooks), one for each forward. Compiled graphs: `explain().tapes`.
    """
    with _lock:
        return list(_kept)


def last_tape_decision() -> TapeDecision | None:
    """The decision of the last eager call in a checkpoint region, or None."""
    with _lock:
        return _kept[-1] if _kept else None
