"""Ranks as threads of one process: the exchange goes through memory, everything else is the code that ranks run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import ple_gdn
from ple_gdn.ops.kcp import exchange as exchange_module
from ple_gdn.ops.kcp.partition import Partition


class Group:
    """Stands for a process group where only its size and name are asked for."""

    group_name = "threads"

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class _Mailbox:
    def __init__(self, world: int) -> None:
        self.barrier, self.parcels = threading.Barrier(world, timeout=300), [{} for _ in range(world)]

    def exchange(self, plan, sends, receive_sizes, like, group_name) -> dict[int, torch.Tensor]:
        self.parcels[plan.rank] = {r: torch.cat([t.reshape(-1) for t in parts]) for r, parts in sends.items()}
        self.barrier.wait()
        nothing = like.new_empty(0, dtype=torch.float32)
        received = {r: self.parcels[r].get(plan.rank, nothing) for r in range(plan.world_size)}
        self.barrier.wait()
        assert {r: t.numel() for r, t in received.items() if t.numel()} == receive_sizes
        return received


def run_ranks(
    patch: pytest.MonkeyPatch,
    part: Partition,
    heads: tuple[int, int],
    work: Callable[[ple_gdn.KcpContext], object],
    **options: object,
) -> list[object]:
    """work(context) of every rank of `part`, each in a thread of its own; the first failure is raised."""
    mailbox, world = _Mailbox(part.world_size), part.world_size
    patch.setattr(exchange_module, "_all_to_all_single", mailbox.exchange)
    results, failures = [None] * world, []

    def rank_main(rank: int) -> None:
        try:
            ctx = ple_gdn.build_kcp_context(part, Group(world), rank, "cpu", **options).prepare(*heads)
            results[rank] = work(ctx)
        except BaseException as failure:
            failures.append(failure)
            mailbox.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [f for f in failures if not isinstance(f, threading.BrokenBarrierError)] or failures
    if real:
        raise real[0]
    return results
