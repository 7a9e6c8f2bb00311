"""Context parallelism over gloo processes: every rank against the single-process op."""

from __future__ import annotations

import socket
import subprocess
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


GROUP_ENDS = """
import gc, sys, torch, torch.distributed as dist
import ple_gdn
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
group = dist.group.WORLD
before = sys.getrefcount(group)
context = ple_gdn.build_kcp_context(ple_gdn.kcp_partition(torch.tensor([0, 70]), 1), group, 0, "cpu").prepare(1, 2)
shapes = ((1, 70, 1, 16), (1, 70, 1, 16), (1, 70, 2, 16), (1, 70, 2), (1, 70, 2))
leaves = [(-torch.rand(s)).requires_grad_() for s in shapes]
o, _ = ple_gdn.gated_delta_rule(*leaves, use_qk_l2norm=True, cp=context)
o.sum().backward()
assert "torch._dynamo" in sys.modules  # what used to take hold of the group
del context, o, leaves
gc.collect()
assert sys.getrefcount(group) == before, (before, sys.getrefcount(group))
dist.destroy_process_group()
"""


def test_nothing_keeps_a_process_group_alive_once_it_is_destroyed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", GROUP_ENDS, f"file://{tmp_path}/store"], check=True, timeout=120)


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
