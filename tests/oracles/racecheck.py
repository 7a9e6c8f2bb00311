"""Reports of compute-sanitizer's racecheck: which are none, which the tool cannot decide, which stand.

Each report names instructions; `sass.Code` reads from the cubin that ran what orders them.

- Ordered: a barrier of the whole CTA lies between the two. So it is with the dispatch of Triton's warp specialisation,
  whose reads of the partition's number and captures the tool reports against stores a barrier earlier or later.
- `UNDECIDABLE`: they are ordinary accesses of different partitions. Only mbarriers order those, and the tool does not
  know mbarriers: it reports the ordered hand-over of `sanitized.py` as it does the one ordered by nothing.
- Refused: all else. Within one partition, or where partitions cannot be told, the barrier has to be shown.

No line of the tool is passed over.
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

ORDERED = "ordered by a barrier of the whole CTA"
UNDECIDABLE = "between partitions, ordered by an mbarrier or by nothing: racecheck cannot tell"
REFUSED = "not shown to be in order"


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


class Verdict(NamedTuple):
    """Reports that stand, and those of accesses between partitions."""

    refused: list[str]
    undecidable: list[str]


def classified(race: list[Access], codes: list[Code]) -> str:
    """`ORDERED`, `UNDECIDABLE` or `REFUSED`: the worst of the race's pairs in the variants that it may be about."""

    def fits(code: Code) -> bool:
        return all(x.offset in code.at and code.instructions[code.at[x.offset]].may(x.kind) for x in race)

    first, *others = race
    pairs = [(code, first.offset, x.offset) for code in codes if fits(code) for x in others]
    left = [(code, one, other) for code, one, other in pairs if not code.apart(one, other)]
    if not pairs or not all(code.between_partitions(one, other) for code, one, other in left):
        return REFUSED
    return UNDECIDABLE if left else ORDERED


def judged(output: str, cubins: Path) -> Verdict:
    """racecheck's output by the code under `cubins`, all that ran, without what that shows to be in order."""
    races, strange = parsed(output)
    verdict = Verdict(strange, [])
    read: dict[str, list[Code]] = {}
    for race in races:
        kernel, kind = race[0].kernel, REFUSED
        try:
            if kernel not in read:
                read[kernel] = [c for path in cubins.rglob(f"{kernel}.cubin") for c in kernels(disassembly(path))]
            if all(x.kernel == kernel for x in race):
                kind = classified(race, read[kernel])
        except Unreadable as reason:
            verdict.refused.append(str(reason))
        if kind != ORDERED:
            text = f"{' against '.join(map(str, race))}: {kind}"
            (verdict.undecidable if kind == UNDECIDABLE else verdict.refused).append(text)
    return verdict
