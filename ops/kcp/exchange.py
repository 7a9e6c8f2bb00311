"""Start states across ranks: fold (M, b) along each document, by ring hops or one all-to-all, with the same bits.

A chain is a document's fragments in the order states flow: document order forward, reversed for the adjoint. Fragment i
maps its start state S to M_i S + b_i. The first of a chain knows its end state outright (`value` without `map`); the
last sends nothing. Why the bits agree (GDN.md §4): one fold kernel, document order at fragment granularity, folded fp32
states on the wire, copies only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from .plan import RankPlan


@dataclass(frozen=True)
class StateMap:
    """What a fragment does to a state: S -> map @ S + value; map is None where the end state is known outright."""

    value: torch.Tensor  # [HV, K, V] fp32
    map: torch.Tensor | None  # [HV, K, K] fp32

    def apply(self, state: torch.Tensor) -> torch.Tensor:
        """The one fold: a batch of HV products, never split or reordered.

        In fp64 and rounded once: fp32 products made the error grow with the ranks (1.8e-7 to 2.2e-7 from 2 to 8 without
        decay, now falling to 1.7e-7), and follow the process's TF32 switch. 0.2 GFLOP a hop at 48 heads of 128x128.
        """
        return torch.baddbmm(self.value.double(), self.map.double(), state.double()).float()

    def after(self, first: StateMap) -> StateMap:
        """This map applied to the result of `first`; without a map where `first` has none."""
        matrix = None if first.map is None else torch.bmm(self.map.double(), first.map.double()).float()
        return StateMap(self.apply(first.value), matrix)


class Exchange:
    """One exchange of start states, whose last wait can be put off: what needs no state runs in between.

    `start` issues collectives until this rank has nothing more to send; `finish` waits for what it receives; `close`
    waits for the rest. A rank that receives nothing never waits for its peers before `close`.

    Args:
        chains: per document, global fragment indices in the order states flow.
        state_shape: (HV, K, V).
        like: tensor that gives the device.
    """

    def __init__(
        self,
        plan: RankPlan,
        chains: Sequence[Sequence[int]],
        state_shape: tuple[int, int, int],
        like: torch.Tensor,
        group_name: str,
        exchange: str,
    ) -> None:
        self.plan, self.state_shape, self.like, self.group_name = plan, state_shape, like, group_name
        self.links = [chain for chain in chains if len(chain) > 1]
        self.entered = {i for chain in self.links for i in chain[1:] if plan.fragments[i].rank == plan.rank}
        self._run = self._ring if exchange == "ring" else self._all_to_all
        self._states: dict[int, torch.Tensor] = {}
        self._unwaited: list[Flight] = []
        self._steps: Iterator[None] = iter(())

    def start(self, maps: Mapping[int, StateMap]) -> None:
        """`maps`: of the local fragments that are not the last of their chain."""
        if self.links:
            self._steps = self._run(maps)
            next(self._steps, None)

    def finish(self) -> dict[int, torch.Tensor]:
        """State that enters each local fragment of `entered`."""
        for _ in self._steps:
            pass
        return self._states

    def close(self) -> None:
        self.finish()
        for flight in self._unwaited:
            flight.wait()

    def _ring(self, maps: Mapping[int, StateMap]) -> Iterator[None]:
        """One hop per link of the longest chain; only folded states travel, each to the next fragment's rank."""
        HV, K, V = self.state_shape
        owner = [f.rank for f in self.plan.fragments]
        here = self.plan.rank
        links = [(hop, a, b) for chain in self.links for hop, (a, b) in enumerate(pairwise(chain))]
        last_send = max((hop for hop, a, _ in links if owner[a] == here), default=-1)
        hops = max(hop for hop, _, _ in links) + 1
        by_hop: list[list[tuple[int, int]]] = [[] for _ in range(hops)]
        for hop, a, b in links:
            if here in (owner[a], owner[b]):
                by_hop[hop].append((a, b))
        idle = True
        for hop, mine in enumerate(by_hop):
            sends: dict[int, list[torch.Tensor]] = {}
            receives: dict[int, list[int]] = {}
            for a, b in mine:
                if owner[a] == here:
                    step = maps[a]
                    leaving = step.value if step.map is None else step.apply(self._states[a])
                    sends.setdefault(owner[b], []).append(leaving)
                if owner[b] == here:
                    receives.setdefault(owner[a], []).append(b)
            flight = self._issue(sends, {rank: HV * K * V * len(which) for rank, which in receives.items()})
            if not receives:
                self._unwaited.append(flight)
                continue
            if idle and hop >= last_send:
                idle = False
                yield
            parcels = flight.wait()
            for rank, which in receives.items():
                for fragment, state in zip(which, parcels[rank].view(-1, HV, K, V), strict=True):
                    self._states[fragment] = state

    def _all_to_all(self, maps: Mapping[int, StateMap]) -> Iterator[None]:
        """Every fragment's (M, b) goes once to each rank with a later fragment of its chain, which folds locally."""
        HV, K, V = self.state_shape
        here = self.plan.rank
        ranks = [[self.plan.fragments[i].rank for i in chain] for chain in self.links]
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[tuple[int, bool]]] = {}
        for chain, owners in zip(self.links, ranks, strict=True):
            for position, (index, owner) in enumerate(zip(chain[:-1], owners, strict=False)):
                with_map = position > 0
                for target in sorted(set(owners[position + 1 :]) - {owner}):
                    if owner == here:
                        mine = maps[index]
                        sends.setdefault(target, []).extend([mine.map, mine.value] if with_map else [mine.value])
                    if target == here:
                        receives.setdefault(owner, []).append((index, with_map))
        sizes = {rank: sum(HV * K * (V + K * m) for _, m in which) for rank, which in receives.items()}
        flight = self._issue(sends, sizes)
        if not receives:
            self._unwaited.append(flight)
            return
        yield
        parcels = flight.wait()
        known = dict(maps)
        for rank, which in receives.items():
            pieces = parcels[rank].split([n for _, m in which for n in ([HV * K * K] * m + [HV * K * V])])
            cursor = iter(pieces)
            for index, with_map in which:
                matrix = next(cursor).view(HV, K, K) if with_map else None
                known[index] = StateMap(next(cursor).view(HV, K, V), matrix)
        self._fold_chains(ranks, known)

    def _fold_chains(self, ranks: list[list[int]], known: Mapping[int, StateMap]) -> None:
        here = self.plan.rank
        for chain, owners in zip(self.links, ranks, strict=True):
            if here not in owners[1:]:
                continue
            last = max(i for i, owner in enumerate(owners) if owner == here)
            state = known[chain[0]].value
            for position in range(1, last + 1):
                if owners[position] == here:
                    self._states[chain[position]] = state
                if position < last:
                    state = known[chain[position]].apply(state)

    def _issue(self, sends: Mapping[int, list[torch.Tensor]], receive_sizes: Mapping[int, int]) -> Flight:
        return issue(self.plan, sends, receive_sizes, self.like, self.group_name)


class Flight(NamedTuple):
    """A collective on its way: `wait` gives the parcel of every rank."""

    tensor: torch.Tensor
    splits: list[int]

    def wait(self) -> dict[int, torch.Tensor]:
        return dict(enumerate(torch.ops._c10d_functional.wait_tensor(self.tensor).split(self.splits)))


def issue(
    plan: RankPlan,
    sends: Mapping[int, list[torch.Tensor]],
    receive_sizes: Mapping[int, int],
    like: torch.Tensor,
    group_name: str,
) -> Flight:
    """One functional all-to-all of fp32 parcels; every rank of the group takes part, also with nothing to say."""
    in_splits = [sum(t.numel() for t in sends.get(rank, ())) for rank in range(plan.world_size)]
    out_splits = [receive_sizes.get(rank, 0) for rank in range(plan.world_size)]
    flat = [t.reshape(-1) for rank in range(plan.world_size) for t in sends.get(rank, ())]
    outgoing = torch.cat(flat) if flat else like.new_empty(0, dtype=torch.float32)
    incoming = torch.ops._c10d_functional.all_to_all_single(outgoing, out_splits, in_splits, group_name)
    return Flight(incoming, out_splits)


def exchanged_bytes(plan: RankPlan, HV: int, K: int, V: int, exchange: str, *, adjoint: bool = False) -> int:
    """Bytes this rank sends for one forward (or adjoint) exchange; a function of the partition, never of T.

    Ring: 4 HV K V a link. All-to-all: 4 HV K (K + V) for each other rank that holds a later (adjoint: an earlier)
    fragment of the document, 4 HV K V where the fragment opens the chain and has no map to send.
    """
    total = 0
    for chain in plan.chains:
        order = chain[::-1] if adjoint else chain
        owners = [plan.fragments[i].rank for i in order]
        for position, owner in enumerate(owners[:-1]):
            if owner != plan.rank:
                continue
            if exchange == "ring":
                total += 4 * HV * K * V
            else:
                width = V + (K if position else 0)
                total += 4 * HV * K * width * len(set(owners[position + 1 :]) - {owner})
    return total
