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
    """The n-th collective of every rank belongs together; `issue` posts, `wait` blocks until all have posted.

    One rank runs at a time, the holder of the baton: Triton's interpreter knows no threads.
    """

    def __init__(self, world: int) -> None:
        self.changed, self.failed, self.baton = threading.Condition(), False, threading.Lock()
        self.posted: list[list[dict[int, torch.Tensor]]] = [[] for _ in range(world)]

    def issue(self, plan, sends, receive_sizes, like, group_name) -> _Flight:
        with self.changed:
            mine = self.posted[plan.rank]
            mine.append({r: torch.cat([t.reshape(-1) for t in parts]) for r, parts in sends.items()})
            self.changed.notify_all()
            return _Flight(self, plan, len(mine) - 1, receive_sizes, like.device)

    def abort(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class _Flight:
    def __init__(self, mailbox, plan, index, receive_sizes, device) -> None:
        self.mailbox, self.plan, self.index, self.receive_sizes = mailbox, plan, index, receive_sizes
        self.device = device

    def wait(self) -> dict[int, torch.Tensor]:
        box = self.mailbox
        box.baton.release()
        with box.changed:
            box.changed.wait_for(lambda: box.failed or all(len(p) > self.index for p in box.posted), timeout=300)
        box.baton.acquire()
        if box.failed:
            raise threading.BrokenBarrierError
        parcels = [posted[self.index] for posted in box.posted]
        nothing = torch.empty(0, device=self.device)
        received = {r: parcel.get(self.plan.rank, nothing) for r, parcel in enumerate(parcels)}
        assert {r: t.numel() for r, t in received.items() if t.numel()} == self.receive_sizes
        return received


def run_ranks(
    patch: pytest.MonkeyPatch,
    part: Partition,
    heads: tuple[int, int],
    work: Callable[[ple_gdn.KcpContext], object],
    device: str = "cpu",
    **options: object,
) -> list[object]:
    """work(context) of every rank of `part`, each in a thread of its own; the first failure is raised."""
    mailbox, world = _Mailbox(part.world_size), part.world_size
    patch.setattr(exchange_module, "issue", mailbox.issue)
    results, failures = [None] * world, []

    def rank_main(rank: int) -> None:
        mailbox.baton.acquire()
        try:
            ctx = ple_gdn.build_kcp_context(part, Group(world), rank, device, **options).prepare(*heads)
            results[rank] = work(ctx)
        except BaseException as failure:
            failures.append(failure)
            mailbox.abort()
        finally:
            mailbox.baton.release()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [f for f in failures if not isinstance(f, threading.BrokenBarrierError)] or failures
    if real:
        raise real[0]
    return results
