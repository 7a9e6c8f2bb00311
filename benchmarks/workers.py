"""Processes that a benchmark keeps beside each other and asks in turn, each question with a time limit.

A worker is a script that calls `serve`: it answers every JSON line of its input with one JSON line. What its libraries
print goes to its log, so that a peer's chatter is never read as an answer.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT_OF_TIME = "out of time"


class Worker:
    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log, self.failed = log, ""
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **(environment or {})},
            )

    def send(self, **question: Any) -> None:
        if not self.failed:
            try:
                self.process.stdin.write(json.dumps(question).encode() + b"\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                self.stop(f"exit status {self.process.wait()}: {self.last_line()}")

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer. No answer in time, or the process's end, ends the worker: `failed` says why from then on."""
        end = time.monotonic() + seconds
        line = b""
        while not self.failed and not line.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                self.stop(OUT_OF_TIME)
                break
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                self.stop(f"exit status {self.process.wait()}: {self.last_line()}")
                break
            line += part
        return {"failed": self.failed} if self.failed else json.loads(line)

    def ask(self, seconds: float, **question: Any) -> dict[str, Any]:
        self.send(**question)
        return self.answer(seconds)

    def last_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][-160:] if lines else "nothing printed"

    def stop(self, why: str = "stopped") -> None:
        self.failed = self.failed or why
        self.process.kill()
        self.process.wait()


def serve(make: Callable[[], Callable[..., dict[str, Any]]]) -> None:
    """Worker side: `make()` once, then what it returned, called with every line of input, until that ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print while they are imported, too
    answer = make()
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=replies)
