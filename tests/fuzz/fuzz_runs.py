"""Runs of a fuzzer: in this process, by workers, and as a script."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import torch
from harness import STRUCTURES, Failure, Fuzzer, Tally

# Workers begin no case in the last seconds, so that groups under way are judged and told of before the time is up.
MARGIN = 8.0

Report = Callable[[int, Tally], None]
"""Is given every group that ended and its tally."""


def groups(
    fuzzer: Fuzzer, seed: int, device: str, first_group: int, every: int, end: float
) -> Iterator[tuple[int, Tally]]:
    """One group of `every` after the other, each with a tally of its own, until `end` of `time.monotonic`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Memory that an op allocates and does not write is NaN: a read of it shows in the result.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        group = first_group
        while time.monotonic() <= end:
            part = Tally(end=end)
            fuzzer(part, seed, group, torch.device(device))
            part.structures[group % STRUCTURES] += part.cases
            yield group, part
            group += every
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def run(
    fuzzer: Fuzzer,
    cases: int,
    seed: int,
    device: str = "cpu",
    first_group: int = 0,
    seconds: float = math.inf,
    report: Report | None = None,
) -> Tally:
    """Runs whole groups until `cases` cases were checked, or so many seconds have gone by."""
    tally = Tally()
    with contextlib.closing(groups(fuzzer, seed, device, first_group, 1, time.monotonic() + seconds)) as parts:
        while tally.cases < cases:
            ended = next(parts, None)
            if ended is None:
                break
            if report is not None:
                report(*ended)
            tally.add(ended[1])
    return tally


def _work(fuzzer: Fuzzer, seed: int, device: str, first_group: int, every: int, end: float, pipe: Connection) -> None:
    """A worker: sends (group, tally) of each group, None at the end of its time, or the traceback it ends with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    with pipe, contextlib.suppress(BrokenPipeError):  # a parent that was killed reads no more
        try:
            for ended in groups(fuzzer, seed, device, first_group, every, end):
                pipe.send(ended)
            pipe.send(None)
        except BrokenPipeError:
            raise
        except BaseException:  # whatever it is, it is told
            pipe.send(traceback.format_exc())


def run_workers(
    fuzzer: Fuzzer,
    cases: int,
    seed: int,
    device: str,
    first_group: int,
    workers: int,
    seconds: float,
    report: Report,
) -> Tally:
    """Worker i runs every `workers`-th group from the i-th on, until each has ended a group and together they have
    `cases` cases, or the time is up.

    What is under way then is ended, not waited for: a kernel may take a minute to compile. A worker that ends in any
    other way is a failure.
    """
    began, context = time.monotonic(), get_context("spawn")
    end, last = began + seconds, began + seconds - min(MARGIN, seconds / 10)
    tally, after = Tally(), {}
    readers: dict[Connection, tuple[BaseProcess, int]] = {}
    processes, silent = [], set(range(workers))
    try:
        for at in range(workers):
            reader, writer = context.Pipe(duplex=False)
            arguments = (fuzzer, seed, device, first_group + at, workers, last, writer)
            processes.append(context.Process(target=_work, args=arguments, daemon=True))
            processes[-1].start()
            writer.close()  # so that the end of the worker is the end of the pipe
            readers[reader], after[at] = (processes[-1], at), first_group + at
        while readers and (silent or tally.cases < cases) and time.monotonic() < end:
            for reader in wait(list(readers), min(end - time.monotonic(), 60.0)):
                process, at = readers[reader]
                told = _told(reader, process)
                silent.discard(at)
                if isinstance(told, tuple):
                    after[at] = told[0] + workers
                    report(*told)
                    tally.add(told[1])
                    continue
                del readers[reader]
                if told is not None:
                    lost = Tally(failures=[Failure(f"seed {seed} group {after[at]}", f"worker {at} ended", told)])
                    report(after[at], lost)
                    tally.add(lost)
    finally:
        _end(processes)
    return tally


def _told(reader: Connection, process: BaseProcess) -> tuple[int, Tally] | str | None:
    """What a worker has sent: a group, why it ended, or None where its time was up."""
    try:
        return reader.recv()
    except (EOFError, OSError):
        process.join(10)
        return f"no word, exit code {process.exitcode}"


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    until = time.monotonic() + 3
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()


def _log(file: TextIO, began: float) -> Report:
    """One line for each group, and for each failure, at once in the file: it is there whatever ends this process."""

    def report(group: int, part: Tally) -> None:
        file.write(
            f"{time.monotonic() - began:.1f} s: group {group}, structure {group % STRUCTURES}, {part.cases} cases, "
            f"{len(part.failures)} wrong, worst {max(part.worst.values(), default=0.0):.2f}\n"
        )
        file.writelines(f"WRONG {f.case}: {f.what}: {f.detail}\n" for f in part.failures)
        file.flush()

    return report


def structure_lines(structures: Counter[int]) -> list[str]:
    """How many cases each structure had, and which had none."""
    counts = [structures[at] for at in range(STRUCTURES)]
    lines = [
        f"cases by structure: {min(counts)} to {max(counts)}, median {statistics.median(counts):.0f}: "
        + " ".join(map(str, counts))
    ]
    none = [str(at) for at, count in enumerate(counts) if count == 0]
    if none:
        lines.append(f"WARNING: no group of {len(none)} of {STRUCTURES} structures was finished: {', '.join(none)}")
    return lines


def status(tally: Tally, cases: int) -> int:
    return 1 if tally.failures else 2 * (tally.cases < cases)


def _print(tally: Tally, given: argparse.Namespace, took: str) -> None:
    print("worst error / allowed: " + ", ".join(f"{k} {v:.2f}" for k, v in sorted(tally.worst.items())))
    print("cases by kind: " + ", ".join(f"{k} {v}" for k, v in sorted(tally.kinds.items())))
    if given.device != "cpu":  # on a CPU what selects kernels is chosen case by case
        print(*structure_lines(tally.structures), sep="\n")
    # Those of workers that ended first: they are why cases are missing.
    for failure in sorted(tally.failures, key=lambda failure: "worker" not in failure.what)[:20]:
        print(f"WRONG {failure.case}: {failure.what}: {failure.detail}")
    print(
        f"{Path(sys.argv[0]).name}: {tally.cases} cases{f' of {given.cases}' * (tally.cases < given.cases)}, "
        f"seed {given.seed}, {given.device}, torch {torch.__version__}: {len(tally.failures)} wrong; "
        f"{tally.compared} tensors compared, {tally.guards} guards read; {took}",
        flush=True,
    )


@contextlib.contextmanager
def _stopped_by_a_signal() -> Iterator[None]:
    """A block that Ctrl-C and SIGTERM, which `timeout` sends, end without ending the process: what was done counts."""

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # `timeout` sends it twice
        raise KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        print("stopped by a signal", flush=True)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def main(fuzzer: Fuzzer, arguments: list[str] | None = None) -> None:
    """`python fuzz_x.py --cases 10000 --seed 0 --device cpu`: prints the result, the totals last; exit status 1 after a
    failure, 2 where the time was up before all cases."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--first-group", type=int, default=0, help="starts here: a failing case names its group")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with every so many-th group")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stops then, with what was done")
    parser.add_argument("--log", type=Path, help="file that gets a line for each group as it ends")
    given = parser.parse_args(arguments)
    clock = time.process_time if given.workers == 1 else time.monotonic
    started, tally = clock(), Tally()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_stopped_by_a_signal())
        log = None if given.log is None else _log(stack.enter_context(given.log.open("w")), time.monotonic())

        def report(group: int, part: Tally) -> None:
            tally.add(part)
            if log is not None:
                log(group, part)

        common = (fuzzer, given.cases, given.seed, given.device, given.first_group)
        if given.workers == 1:
            run(*common, given.seconds, report)
        else:
            run_workers(*common, given.workers, given.seconds, report)
    _print(tally, given, f"{clock() - started:.0f} {'CPU s' if given.workers == 1 else f's, {given.workers} workers'}")
    sys.exit(status(tally, given.cases))
