"""Context parallelism over gloo processes: every rank against the single-process op."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from queue import Empty

import pytest
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
import kcp_worker

WORLD = 4


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int], str | None]:
    """(check, rank) -> traceback or None; the processes start once for all checks."""
    context = mp.get_context("spawn")
    queue, port = context.Queue(), free_port()
    workers = [context.Process(target=kcp_worker.worker, args=(r, WORLD, port, queue)) for r in range(WORLD)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(600)
    found = {}
    while True:
        try:
            name, rank, failure = queue.get(timeout=1)
        except Empty:
            break
        found[name, rank] = failure
    for process in workers:
        process.kill()
    return found


@pytest.mark.parametrize("name", kcp_worker.CHECKS)
def test_ranks_agree_with_one_process(name, outcomes):
    missing = [rank for rank in range(WORLD) if (name, rank) not in outcomes]
    failures = [f"rank {rank}:\n{text}" for (check, rank), text in outcomes.items() if check == name and text]
    assert not failures, "\n".join(failures)
    assert not missing, f"ranks {missing} died or hung"
