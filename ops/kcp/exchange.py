"""Start states across ranks: fold (M, b) along each document, by ring hops or one all-to-all, with the same bits.

A chain is a document's fragments in the order states flow: document order forward, reversed for the adjoint. Fragment i
maps its start state S to M_i S + b_i. The first of a chain knows its end state outright (`value` without `map`); the
last sends nothing. Why the bits agree (GDN.md §4): one fold kernel, document order at fragment granularity, folded fp32
states on the wire, copies only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def exchange_states(
    plan: RankPlan,
    chains: Sequence[Sequence[int]],
    maps: Mapping[int, StateMap],
    state_shape: tuple[int, int, int],
    like: torch.Tensor,
    group_name: str,
    exchange: str,
) -> dict[int, torch.Tensor]:
    """State that enters each local fragment which is not the first of its chain.

    Args:
        chains: per document, global fragment indices in the order states flow.
        maps: of the local fragments that are not the last of their chain.
        state_shape: (HV, K, V).
        like: tensor that gives the device.
    """
    links = [chain for chain in chains if len(chain) > 1]
    if not links:
        return {}
    run = _ring if exchange == "ring" else _all_to_all
    return run(plan, links, maps, state_shape, like, group_name)


def _ring(plan, links, maps, state_shape, like, group_name) -> dict[int, torch.Tensor]:
    """One hop per link of the longest chain; only folded states travel, each to the next fragment's rank."""
    HV, K, V = state_shape
    entering: dict[int, torch.Tensor] = {}
    for hop in range(max(len(chain) for chain in links) - 1):
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[int]] = {}
        for chain in links:
            if hop + 1 >= len(chain):
                continue
            here, there = chain[hop], chain[hop + 1]
            source, target = plan.fragments[here].rank, plan.fragments[there].rank
            if source == plan.rank:
                mine = maps[here]
                leaving = mine.value if mine.map is None else mine.apply(entering[here])
                sends.setdefault(target, []).append(leaving)
            if target == plan.rank:
                receives.setdefault(source, []).append(there)
        parcels = _all_to_all_single(
            plan, sends, {rank: HV * K * V * len(which) for rank, which in receives.items()}, like, group_name
        )
        for rank, which in receives.items():
            for fragment, state in zip(which, parcels[rank].view(-1, HV, K, V), strict=True):
                entering[fragment] = state
    return entering


def _all_to_all(plan, links, maps, state_shape, like, group_name) -> dict[int, torch.Tensor]:
    """Every fragment's (M, b) goes once to each rank that holds a later fragment of its chain, which folds locally."""
    HV, K, V = state_shape
    ranks = [[plan.fragments[i].rank for i in chain] for chain in links]
    sends: dict[int, list[torch.Tensor]] = {}
    receives: dict[int, list[tuple[int, bool]]] = {}
    for chain, owners in zip(links, ranks, strict=True):
        for position, (index, owner) in enumerate(zip(chain[:-1], owners, strict=False)):
            with_map = position > 0
            for target in sorted(set(owners[position + 1 :]) - {owner}):
                if owner == plan.rank:
                    mine = maps[index]
                    sends.setdefault(target, []).extend([mine.map, mine.value] if with_map else [mine.value])
                if target == plan.rank:
                    receives.setdefault(owner, []).append((index, with_map))
    sizes = {rank: sum(HV * K * (V + K * m) for _, m in which) for rank, which in receives.items()}
    parcels = _all_to_all_single(plan, sends, sizes, like, group_name)
    known = dict(maps)
    for rank, which in receives.items():
        pieces = parcels[rank].split([n for _, m in which for n in ([HV * K * K] * m + [HV * K * V])])
        cursor = iter(pieces)
        for index, with_map in which:
            matrix = next(cursor).view(HV, K, K) if with_map else None
            known[index] = StateMap(next(cursor).view(HV, K, V), matrix)
    entering: dict[int, torch.Tensor] = {}
    for chain, owners in zip(links, ranks, strict=True):
        if plan.rank not in owners[1:]:
            continue
        last = max(i for i, owner in enumerate(owners) if owner == plan.rank)
        state = known[chain[0]].value
        for position in range(1, last + 1):
            if owners[position] == plan.rank:
                entering[chain[position]] = state
            if position < last:
                state = known[chain[position]].apply(state)
    return entering


def _all_to_all_single(
    plan: RankPlan,
    sends: Mapping[int, list[torch.Tensor]],
    receive_sizes: Mapping[int, int],
    like: torch.Tensor,
    group_name: str,
) -> dict[int, torch.Tensor]:
    """One functional all-to-all of fp32 parcels; every rank of the group takes part, also with nothing to say."""
    in_splits = [sum(t.numel() for t in sends.get(rank, ())) for rank in range(plan.world_size)]
    out_splits = [receive_sizes.get(rank, 0) for rank in range(plan.world_size)]
    flat = [t.reshape(-1) for rank in range(plan.world_size) for t in sends.get(rank, ())]
    outgoing = torch.cat(flat) if flat else like.new_empty(0, dtype=torch.float32)
    incoming = torch.ops._c10d_functional.all_to_all_single(outgoing, out_splits, in_splits, group_name)
    incoming = torch.ops._c10d_functional.wait_tensor(incoming)
    return dict(enumerate(incoming.split(out_splits)))


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
