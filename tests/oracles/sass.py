"""Which accesses of a compiled kernel a barrier of the whole CTA keeps apart, and which lie in different partitions.

All threads of a CTA pass the barriers that wait for all of them (`BAR.SYNC id`, no count) together: each thread's k-th
arrival is the same event. So an access that every path reaches after p of them, and one that every path reaches after
another number, never meet. Here p is counted along all paths of the disassembly, modulo `TURN`: remainders that differ
are numbers that differ. What is not understood (an indirect branch without targets, a barrier known at run time only)
is an error or more paths, never fewer: then nothing is shown.

Triton's warp specialisation has exactly `TURN` of these barriers in a turn of its dispatch loop: the default warps have
written state and captures, the workers have read them, all are done. States and captures are written at 0, read at 1,
the partitions run at 2.

A partition is what can be reached from where a worker, having read its number and before reading the next, first sets
its registers (`USETMAXREG`), wherever a `BRX` or a tree of branches sends it; the default one is what is reached from
the entry and leads to no such read. Code that several partitions reach is of all of them, code of none is of no known
one: in neither case are two accesses in different partitions.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

TURN = 3
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[\dT]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?\s*(\(\*.*)?$")
_LABEL = re.compile(r"[`(]*\((\.?[$\w.]+)\)|(\.L_x_\d+)")
_SECTION = re.compile(r"\s*\.section\s+\.text\.([\w$.]+)")
_ORDINARY = re.compile(r"(LDSM?|STSM?|ATOMS|LD|ST|ATOM)(\.|$)")
_ASYNCHRONOUS = re.compile(r"(RED\w*|LDGSTS|ARRIVES|SYNCS|UTMA\w*|UBLK\w*|\w*GMMA)(\.|$)")
_REFUSED = ("BRXU", "JMP", "JMX", "CALL.ABS", "RET.ABS", "RPCMOV", "BPT")


class Unreadable(ValueError):
    """The code holds something that is not understood, so nothing is known of its order."""


class Instruction(NamedTuple):
    """One line: guard as `P0` or `!P0`, and the places it may go to other than the next line."""

    offset: int
    guard: str
    name: str
    operands: str
    targets: tuple[str, ...]

    def may(self, kind: str) -> bool:
        """May it be a "Read" or a "Write" of shared memory?"""
        named = _ORDINARY.match(self.name) or _ASYNCHRONOUS.match(self.name)
        return bool(named) and not self.name.startswith({"Read": "STS", "Write": "LDS"}[kind])

    @property
    def barrier(self) -> str:
        """The id of a barrier that waits for the whole CTA, else ''."""
        alone = self.name.startswith("BAR.SYNC") and re.fullmatch(r"0x[0-9a-f]+", self.operands)
        return self.operands if alone else ""


class Code:
    """One kernel's instructions and, for each, after how many barriers of the CTA it runs."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._read(text)
        self.at = {x.offset: i for i, x in enumerate(self.instructions)}
        self._phases = {barrier: self._walk(barrier) for barrier in self._barriers()}

    def apart(self, one: int, other: int) -> bool:
        """True where a barrier of the whole CTA lies between any two executions of these offsets.

        Never of copies and products, which are still under way when the thread that issued them passes a barrier.
        """
        a, b = self.at[one], self.at[other]
        if not self._ordinary(a, b):
            return False
        return any(p[a] and p[b] and p[a].isdisjoint(p[b]) for p in self._phases.values())

    def partitions(self, offset: int) -> set[int]:
        """The partitions that may run this offset, the default one as 0; empty where none is known to."""
        return {n for n, part in enumerate(self._partitions) if self.at[offset] in part}

    def between_partitions(self, one: int, other: int) -> bool:
        """True where the offsets run while partitions do and no partition runs both."""
        if not self._ordinary(self.at[one], self.at[other]):
            return False
        a, b = self.partitions(one), self.partitions(other)
        during = all(self._phases["0x1"][self.at[x]] == {2} for x in (one, other)) if a and b else False
        return during and a.isdisjoint(b)

    def _ordinary(self, *places: int) -> bool:
        return all(_ORDINARY.match(self.instructions[i].name) for i in places)

    @cached_property
    def _partitions(self) -> list[set[int]]:
        reads = [i for i, x in enumerate(self.instructions) if x.name == "LDS.U8"]
        if "0x1" not in self._phases or [self._phases["0x1"][i] for i in reads] != [{1}]:
            return []  # the number is read once, at 1
        (read,) = reads
        after = self._edges(read)
        before: dict[int, list[int]] = defaultdict(list)
        for i, places in after.items():
            for place in places:
                before[place].append(i)
        sets = {i for i, x in enumerate(self.instructions) if x.name.startswith("USETMAXREG")}
        starts = _reached(after[read], after, sets | {read}) & sets
        default = _reached([0], after, {read}) - _reached([read], before, ())
        return [default, *(_reached([i], after, {read}) for i in sorted(starts))]

    def _edges(self, read: int) -> dict[int, list[int]]:
        """Where a thread may go next; from a BSYNC on to a BSSY's label only if that leads here within a partition."""
        after = {i: list(self._next(i, {})) for i in range(len(self.instructions))}
        ends = [i for i, x in enumerate(self.instructions) if x.name == "BSYNC"]
        after |= {i: [i + 1] for i in ends}
        starts = [i for i, x in enumerate(self.instructions) if x.name.startswith("BSSY")]
        pairs = [(i, j) for i in starts for j in ends if self._pairs(self.instructions[i], self.instructions[j])]
        while True:
            led = [(i, j) for i, j in pairs if j in _reached([i], after, {read})]
            new = [(j, self._labels[self.instructions[i].targets[0]]) for i, j in led]
            new = [(j, place) for j, place in new if place not in after[j]]
            if not new:
                return after
            for j, place in new:
                after[j].append(place)

    def _read(self, text: str) -> None:
        for line in text.splitlines():
            label = re.fullmatch(r"(\.?[$\w.]+):", line.strip())
            if label:
                self._labels[label[1]] = len(self.instructions)
            match = _LINE.match(line)
            if match:
                offset, guard, name, operands, comment = match.groups()
                targets = [a or b for a, b in _LABEL.findall(operands)]
                if name.startswith("BRX"):
                    targets = re.findall(r"\.L_x_\d+", comment or "")
                self.instructions.append(Instruction(int(offset, 16), guard or "", name, operands, tuple(targets)))

    def _barriers(self) -> list[str]:
        """The ids that only ever wait for the whole CTA."""
        uses = defaultdict(set)
        for x in self.instructions:
            if x.name.startswith("BAR."):
                uses[x.operands.split(",")[0].strip()].add(x.barrier)
        if any(not re.fullmatch("0x[0-9a-f]+", name) for name in uses):
            raise Unreadable(f"{self.name}: a barrier known at run time only")
        return sorted(name for name, kinds in uses.items() if "" not in kinds)

    def _next(self, i: int, known: dict[str, bool]) -> Iterator[int]:
        """Where a thread may go from instruction i, given the predicates it knows."""
        x = self.instructions[i]
        taken = known.get(x.guard.lstrip("!"))
        skipped = (taken is not None and taken == x.guard.startswith("!")) or x.guard in ("!PT", "!UPT")
        certain = x.guard in ("", "PT", "UPT") or (taken is not None and not skipped)
        places = [self._labels[t] for t in x.targets if t in self._labels]
        if x.name.startswith(_REFUSED) or len(places) < len(x.targets):
            raise Unreadable(f"{self.name}+{x.offset:#x}: {x.name} {x.operands}")
        if x.name.startswith("BRX") and not places:
            raise Unreadable(f"{self.name}+{x.offset:#x}: a branch to anywhere")
        # Only a branch that names nothing but its target surely goes there.
        plain = x.name == "BRA" and re.fullmatch(r"`?\(\S+\)", x.operands)
        leaves = plain or x.name.startswith(("BRX", "CALL", "RET", "EXIT", "KILL"))
        if not (leaves and certain):
            yield i + 1
        if skipped:
            return
        if x.name.startswith("RET"):
            places = [j + 1 for j, y in enumerate(self.instructions) if y.name.startswith("CALL")]
        if x.name == "BSYNC":
            # Threads gather here and go on at the BSSY's label, as a rule the next line.
            places = [self._labels[y.targets[0]] for y in self.instructions if self._pairs(y, x)]
        if not x.name.startswith("BSSY"):
            yield from places

    @staticmethod
    def _pairs(start: Instruction, end: Instruction) -> bool:
        return start.name.startswith("BSSY") and start.operands.split(",")[0] == end.operands

    def _walk(self, barrier: str) -> list[set[int]]:
        """Per instruction the numbers of this barrier, modulo `TURN`, after which a thread can reach it.

        A thread that skips a guarded barrier skips, while the predicate stands, all that its guard guards.
        """
        phases: list[set[int]] = [set() for _ in self.instructions]
        pending = [(0, 0, ())]
        seen = set(pending)
        while pending:
            i, phase, known = pending.pop()
            if i >= len(self.instructions):
                continue
            x = self.instructions[i]
            phases[i].add(phase)
            for now, after in self._step(x, x.barrier == barrier, phase, dict(known)):
                for place in self._next(i, now):
                    written = {name: value for name, value in now.items() if not self._touches(x, name)}
                    state = (place, after, tuple(sorted(written.items())))
                    if state not in seen:
                        seen.add(state)
                        pending.append(state)
        return phases

    @staticmethod
    def _touches(x: Instruction, predicate: str) -> bool:
        return bool(re.search(rf"(?<!\w)({predicate}|PR|UPR)(?!\w)", x.operands))

    @staticmethod
    def _step(x: Instruction, counts: bool, phase: int, known: dict[str, bool]) -> Iterator[tuple[dict, int]]:
        """What a thread knows and has passed after x: two futures where a guard decides on a barrier."""
        if not counts:
            yield known, phase
            return
        guard, negated = x.guard.lstrip("!"), x.guard.startswith("!")
        choices = (True, False) if guard and guard not in known else (known.get(guard, True),)
        for value in choices:
            passes = not guard or value != negated
            yield ({**known, guard: value} if guard else known), (phase + passes) % TURN


def _reached(starts: Iterable[int], edges: dict[int, list[int]], ends: Container[int]) -> set[int]:
    """All places on the ways from the starts, which stop at the ends."""
    found: set[int] = set()
    pending = list(starts)
    while pending:
        i = pending.pop()
        if i not in found:
            found.add(i)
            pending += [] if i in ends else edges.get(i, [])
    return found


def disassembly(cubin: Path) -> str:
    import triton

    tool = triton.knobs.nvidia.nvdisasm.path
    return subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def kernels(text: str) -> list[Code]:
    """The kernels of a disassembled cubin."""
    parts = re.split(r"(?m)^(?=\s*\.section\s)", text)
    return [Code(match[1], part) for part in parts if (match := _SECTION.match(part))]
