"""DDP, FSDP2 and DTensors over two gloo processes."""

from __future__ import annotations

import socket
from queue import Empty

import distributed_worker
import pytest
import torch.multiprocessing as mp


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int], str | None]:
    """(check, rank) -> traceback or None; the two processes start once for all checks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=distributed_worker.worker, args=(rank, port, queue)) for rank in range(2)]
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


@pytest.mark.parametrize("name", distributed_worker.CHECKS)
def test_two_processes_agree_with_one(name: str, outcomes: dict[tuple[str, int], str | None]) -> None:
    failures = [f"rank {rank}:\n{text}" for (check, rank), text in outcomes.items() if check == name and text]
    assert not failures, "\n".join(failures)
    assert [rank for rank in range(2) if (name, rank) in outcomes] == [0, 1]
