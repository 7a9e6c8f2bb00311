"""Packs of documents that the context-parallel benchmarks share: cu_seqlens as lists of integers."""

from __future__ import annotations

import random
from itertools import accumulate

TOKENS = 262_144
SEVEN = list(accumulate([40961, 3000, 65000, 17, 9000, 120000, 24009], initial=0))


def one_document(seed: int) -> list[int]:
    """One document of 200k to 262k tokens."""
    return [0, random.Random(seed).randint(200_000, TOKENS)]


def log_normal(seed: int, median: int = 4096, sigma: float = 1.5) -> list[int]:
    """Documents with log-normal lengths that fill the pack; the last is cut to fit."""
    rng = random.Random(seed)
    bounds = [0]
    while bounds[-1] < TOKENS:
        length = max(1, round(median * rng.lognormvariate(0.0, sigma)))
        bounds.append(min(TOKENS, bounds[-1] + length))
    return bounds


def short(seed: int, documents: int = 1000) -> list[int]:
    """A full pack cut at random into `documents` documents."""
    return [0, *sorted(random.Random(seed).sample(range(1, TOKENS), documents - 1)), TOKENS]
