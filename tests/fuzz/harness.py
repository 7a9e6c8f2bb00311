"""What the fuzzers share: seeded choices, tensors between NaN guards, errors against float64. Runs: `fuzz_runs.py`."""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

# The oracles: this file is imported first by every fuzzer, which may run as a script.
sys.path.insert(0, str(Path(__file__).parents[1]))

GUARD = 64
"""Elements of a guard in front of and behind every tensor."""


@dataclass
class Failure:
    """One case that was wrong: where, what, by how much, and the choices that lead there."""

    case: str
    what: str
    detail: str


@dataclass
class Tally:
    """Result of a run."""

    cases: int = 0
    guards: int = 0
    compared: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    structures: Counter[int] = field(default_factory=Counter)
    """Cases of each structure."""
    failures: list[Failure] = field(default_factory=list)
    end: float = math.inf
    """Of `time.monotonic`: no case begins after it."""

    def late(self) -> bool:
        return time.monotonic() > self.end

    def note(self, name: str, share: float) -> None:
        """`share`: error over allowed error."""
        self.worst[name] = max(self.worst.get(name, 0.0), share)

    def add(self, other: Tally) -> None:
        self.cases, self.guards = self.cases + other.cases, self.guards + other.guards
        self.compared, self.kinds = self.compared + other.compared, self.kinds + other.kinds
        self.structures = self.structures + other.structures
        self.failures += other.failures
        for name, share in other.worst.items():
            self.note(name, share)


STRUCTURES = 16
"""Structures on a GPU, where each set of them compiles some forty kernels: what selects a kernel follows the group."""


class Source:
    """Choices and values of one case; the same for the same seed on every machine (values are made on the CPU).

    `structure` makes the choices that select a kernel: dtypes, widths, packing. On a GPU groups that are equal modulo
    `STRUCTURES` share them, and whether tensors begin at aligned addresses; elsewhere they are choices like any other.
    """

    def __init__(self, kind: str, seed: object, group: int, *case: object, device: torch.device) -> None:
        self.pick = random.Random("/".join(map(str, (kind, seed, group, *case))))
        self.structure, self.aligned = self.pick, False
        if device.type != "cpu":
            self.structure = random.Random(f"{kind}/{seed}/structure {group % STRUCTURES}")
            self.aligned = self.structure.random() < 0.85
        self.generator = torch.Generator().manual_seed(self.pick.getrandbits(48))
        self.device = device
        self._guarded: list[tuple[str, Tensor, Tensor, slice | None]] = []

    def chance(self, probability: float) -> bool:
        return self.pick.random() < probability

    def choice(self, values: Sequence, weights: Sequence[float] | None = None, *, structure: bool = False) -> object:
        return (self.structure if structure else self.pick).choices(values, weights)[0]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def guarded(self, name: str, values: Tensor, *, dense: bool = False) -> Tensor:
        """`values` on the device, inside a larger buffer of NaN (of the largest number, for integers), oddly laid out.

        Gaps between rows, steps and permuted dimensions are part of the guard: `untouched` reads the whole buffer.
        """
        order = list(range(values.dim()))
        if not dense and self.chance(0.4):
            self.pick.shuffle(order)
        sizes = [values.shape[d] for d in order]
        gaps = [0 if dense else self.choice((0, 1, 3), (4, 1, 1)) for _ in sizes]
        step = 1 if dense or not sizes else self.choice((1, 2, 3), (6, 1, 1))
        padded = [size + gap for size, gap in zip(sizes, gaps, strict=True)]
        if sizes:
            padded[-1] = sizes[-1] * step + gaps[-1]
        count = 1
        for size in padded:
            count *= size
        extra = 0 if dense else self.pick.randrange(8)
        starts = [self.pick.randint(0, gap) for gap in gaps]
        inner = 0
        for start, size in zip(starts, padded, strict=True):
            inner = inner * size + start
        front = GUARD + (-inner % GUARD if self.aligned else extra)
        buffer = torch.full((front + count + GUARD,), _garbage(values.dtype), dtype=values.dtype, device=self.device)
        view = buffer[front : front + count].view(padded)
        for at, (size, start) in enumerate(zip(sizes, starts, strict=True)):
            stop = start + (size * step if at == len(sizes) - 1 else size)
            view = view.narrow(at, start, stop - start)
        if sizes:
            view = view[..., ::step]
        view = view.permute([order.index(d) for d in range(values.dim())]) if sizes else view.reshape(())
        view.copy_(values)
        self._guarded.append((name, buffer, buffer.clone(), None))
        return view

    def scratch(self, name: str, size: int) -> Tensor:
        """`size` bytes that an op may write, between guards that it may not."""
        start = 256  # as an allocator aligns, and as an op may ask for
        buffer = torch.full((start + size + GUARD,), 255, dtype=torch.uint8, device=self.device)
        self._guarded.append((name, buffer, buffer.clone(), slice(start, start + size)))
        return buffer[start : start + size]

    def touched(self) -> list[str]:
        """Names of the tensors whose buffer is not bit for bit what it was."""
        names = []
        for name, buffer, before, free in self._guarded:
            now, then = buffer.view(torch.uint8), before.view(torch.uint8)
            if free is not None:
                now, then = (torch.cat([x[: free.start], x[free.stop :]]) for x in (now, then))
            if not torch.equal(now, then):
                names.append(name)
        return names

    @property
    def guards(self) -> int:
        return 2 * len(self._guarded)

    def gradient(self, name: str, like: Tensor) -> Tensor:
        """An upstream gradient: random between guards, or expanded from fewer values as `.sum()` sends it."""
        if self.chance(0.3):
            kept = [size if self.chance(0.4) else 1 for size in like.shape]
            return self.guarded(name, self.normal(*kept).to(like.dtype)).expand(like.shape)
        return self.guarded(name, self.normal(*like.shape).to(like.dtype))

    def boundaries(self, tokens: int) -> tuple[int, ...]:
        """0 and the ends of 0 to 7 documents: empty ones, one-token ones and rows of no document included."""
        if self.chance(0.05):
            return (0,)
        live = tokens if self.chance(0.7) else self.pick.randint(0, tokens)
        cuts = sorted(self.pick.randint(0, live) for _ in range(self.pick.randint(0, 6)))
        if cuts and self.chance(0.3):
            cuts[0] = min(1, cuts[0])
        return (0, *cuts, live)


def _garbage(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and values; NaN equals NaN, 0.0 equals -0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


Fuzzer = Callable[[Tally, int, int, torch.device], None]
"""Adds to the tally the cases of one group: (tally, seed, group, device)."""
