"""Context parallelism over gloo processes: every rank against the single-process op."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
import kcp_worker

WORLD = 4


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("name", kcp_worker.CHECKS)
def test_ranks_agree_with_one_process(name):
    context = mp.get_context("spawn")
    queue, port = context.SimpleQueue(), free_port()
    workers = [context.Process(target=kcp_worker.worker, args=(r, WORLD, port, name, queue)) for r in range(WORLD)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(300)
    failures = [queue.get() for _ in workers if not queue.empty()]
    for process in workers:
        process.kill()
    assert len(failures) == WORLD, "a rank died or hung"
    failed = [text for text in failures if text]
    assert not failed, "\n".join(failed)
