"""PTX as text: instructions, operands and labels."""

from __future__ import annotations

import re

LABEL = re.compile(r"^(\$\w+):")
INSTRUCTION = re.compile(r"^(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*?);")


def split_operands(text: str) -> list[str]:
    out, depth, part = [], 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            out.append(part.strip())
            part = ""
        else:
            part += c
    return [*out, part.strip()] if part.strip() else out


def parse(ptx: str) -> tuple[list[tuple], dict[str, int]]:
    """(guard negated, guard, opcode parts, operands, source line) of each instruction, and where labels point."""
    code, labels, place = [], {}, "?"
    for raw in ptx[ptx.index("%bb.0") :].splitlines()[1:]:
        line, _, comment = raw.partition("//")
        line = line.strip()
        if line.startswith(".loc"):
            place = comment.split()[0] if comment else place
        for piece in (line,) if ";" not in line else [p + ";" for p in line.split(";") if p.strip()]:
            piece = piece.strip()
            if label := LABEL.match(piece):
                labels[label[1]] = len(code)
            elif piece and piece[0] in "@abcdefghijklmnopqrstuvwxyz" and (m := INSTRUCTION.match(piece)):
                code.append((m[1] == "!", m[2], m[3].split("."), split_operands(m[4]), place))
        if line == "}" and code and code[-1][2][0] == "ret":
            break
    return code, labels
