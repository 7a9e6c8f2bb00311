"""Reports of compute-sanitizer's racecheck: which are real, which the kernel's machine code shows to be none.

racecheck takes the dispatch of Triton's warp specialisation for a race: it reports the reads of the partition's number
and of its captures against the stores that the default warps made a barrier earlier or make a barrier later. Each such
report names two instructions; `sass.Code` shows from the cubin that ran whether a barrier of the whole CTA lies between
them. Nothing else is accepted, and no line of the tool is passed over.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from .sass import Code, Unreadable, disassembly, kernels

_ACCESS = re.compile(r"(Read|Write) access at (\S.*?)\+0x([0-9a-f]+)( in .*?)?( \[\d+ hazards?\])?")
_FIRST = re.compile(rf"(?:Error|Warning|Info): Race reported between {_ACCESS.pattern}")
_OTHER = re.compile(rf"and {_ACCESS.pattern}")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \(\d+ errors?, \d+ warnings?\)")


class Access(NamedTuple):
    kind: str
    kernel: str
    offset: int

    def __str__(self) -> str:
        return f"{self.kind} {self.kernel}+{self.offset:#x}"


class Report(NamedTuple):
    """Races, each an access and those it collides with, and lines that are not understood."""

    races: list[list[Access]]
    strange: list[str]


def parsed(output: str) -> Report:
    """The tool's lines of an output; the program's own are not looked at."""
    races: list[list[Access]] = []
    strange, counted = [], []
    for line in output.splitlines():
        if not line.startswith("========="):
            continue
        text = line.removeprefix("=========").strip()
        if match := _FIRST.fullmatch(text):
            races.append([])
        elif match := _SUMMARY.fullmatch(text):
            counted.append(int(match[1]))
            continue
        elif not (match := races and _OTHER.fullmatch(text)):
            if text not in ("", "COMPUTE-SANITIZER"):
                strange.append(text)
            continue
        races[-1].append(Access(match[1], match[2], int(match[3], 16)))
    if counted != [len(races)]:
        strange.append(f"{len(races)} races were read, the tool counts {counted}")
    return Report(races, strange)


def ordered(race: list[Access], codes: list[Code]) -> bool:
    """True where the code keeps the pairs apart in every variant of the kernel that the report may be about."""

    def fits(code: Code) -> bool:
        return all(x.offset in code.at and code.instructions[code.at[x.offset]].may(x.kind) for x in race)

    variants = [code for code in codes if fits(code)]
    first, *others = race
    return bool(variants and others) and all(c.apart(first.offset, x.offset) for c in variants for x in others)


def unexplained(output: str, cubins: Path) -> list[str]:
    """What of racecheck's output the code under `cubins`, all that ran, does not show to be in order."""
    races, left = parsed(output)
    read: dict[str, list[Code]] = {}
    for race in races:
        kernel = race[0].kernel
        try:
            if kernel not in read:
                read[kernel] = [c for path in cubins.rglob(f"{kernel}.cubin") for c in kernels(disassembly(path))]
            known = all(x.kernel == kernel for x in race) and ordered(race, read[kernel])
        except Unreadable as reason:
            left.append(str(reason))
            known = False
        if not known:
            left.append(" against ".join(map(str, race)))
    return left
