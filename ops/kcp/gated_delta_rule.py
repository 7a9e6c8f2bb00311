"""Gated delta rule over a rank's shard: summaries, exchange, walk; and the adjoint.

The local run treats every segment as a document of its own whose start state was exchanged. A segment that closes its
document needs no summary, one that opens it no map (GDN.md §4); where it is all of its fragment, it needs no summary
either: its walk comes before the exchange. All states and maps are fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from ..gated_delta_rule.checks import check_inputs
from ..gated_delta_rule.tapes import Tapes
from ..register import register_op
from ..triton_support import triton_ready
from ..validation import FLOATS, check_device, check_dtype, check_rank, check_shape
from .context import SPARE
from .exchange import Exchange, StateMap
from .local import BackwardRun, ForwardRun, Inputs, index_tensor, without_starts
from .plan import RankPlan, Walks, decode_plan, needs_map

Tensor = torch.Tensor
_Tensors = tuple[torch.Tensor, ...]


def _check_inputs(q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets) -> None:
    """Raises ValueError or TypeError naming the argument; shared by the implementation and the fake."""
    check_inputs(q, k, v, g, beta, None, segments, chunk_offsets, None)
    check_dtype("q", q, FLOATS)
    for name, tensor in (("table", table), ("pack", pack)):
        check_rank(name, tensor, 1, "of integers")
        check_dtype(name, tensor, (torch.int64,))
        check_device(name, tensor, torch.device("cpu"), "the plan")
    if initial_state is not None:
        shape = (pack.shape[0] - 1, v.shape[2], k.shape[3], v.shape[3])
        check_shape("initial_state", initial_state, shape, "[N, HV, K, V], N documents of the whole pack")
        check_dtype("initial_state", initial_state, (torch.float32,))
        check_device("initial_state", initial_state, q.device, "q")


def _flatten_maps(maps: Tensor) -> Tensor:
    """[n * HV * K * K + SPARE]: see SPARE."""
    flat = maps.new_empty(maps.numel() + SPARE)
    flat[:-SPARE] = maps.view(-1)
    return flat


class _Chain:
    """Local segments of each fragment in the order states flow, with their maps."""

    def __init__(self, plan: RankPlan, values: dict[int, torch.Tensor], maps: dict[int, torch.Tensor], adjoint: bool):
        self.plan, self.values, self.maps = plan, values, maps
        self.fragments: dict[int, list[int]] = {}
        for i, s in enumerate(plan.segments):
            self.fragments.setdefault(s.fragment, []).append(i)
        if adjoint:
            self.fragments = {f: rows[::-1] for f, rows in self.fragments.items()}

    def _map(self, i: int) -> StateMap:
        return StateMap(self.values[i], self.maps.get(i))

    def fragment_maps(self, chains: Sequence[Sequence[int]]) -> dict[int, StateMap]:
        """Fold of each local fragment that hands a state on to another rank."""
        handing_on = {i for links in chains for i in links[:-1]}
        out = {}
        for fragment, rows in self.fragments.items():
            if fragment not in handing_on:
                continue
            total = self._map(rows[0])
            for i in rows[1:]:
                total = self._map(i).after(total)
            out[fragment] = total
        return out

    def fill(self, states: torch.Tensor, fragments: Iterable[int], entering: dict[int, torch.Tensor]) -> None:
        """Writes the state that enters each segment of the fragments to `states` [S, HV, K, V]; where a fragment opens
        the flow of its document, that of its first segment is there already."""
        for fragment in fragments:
            rows = self.fragments[fragment]
            if fragment in entering:
                states[rows[0]] = entering[fragment]
            for before, i in pairwise(rows):
                step = self._map(before)
                states[i] = step.value if step.map is None else step.apply(states[before])


def _walk_all(
    run: ForwardRun | BackwardRun, chain: _Chain, exchange: Exchange, chains: Sequence[Sequence[int]], walks: Walks,
    states: Tensor,
) -> None:  # fmt: skip
    """Exchanges states and walks every segment: first those whose end states travel, and while states are on their way
    those that wait for none."""
    for part in walks.sending:
        run.walk(part, states)
    chain.values |= {i: run.leaving(i) for i in walks.sent}
    exchange.start(chain.fragment_maps(chains))
    run.meanwhile()
    chain.fill(states, [f for f in chain.fragments if f not in exchange.entered], {})
    for part in walks.ready:
        run.walk(part, states)
    chain.fill(states, sorted(exchange.entered), exchange.finish())
    for part in walks.waiting:
        run.walk(part, states)
    exchange.close()


def _documents(plan: RankPlan, chosen: list[int], device: torch.device) -> Tensor:
    return index_tensor([plan.fragments[plan.segments[i].fragment].document for i in chosen], device)


def _between(plan: RankPlan, states: Tensor | None, chosen: list[int], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """[S, HV, K, V] fp32: the documents' given states at the chosen segments, zero elsewhere."""
    out = like.new_zeros(len(plan.segments), *shape, dtype=torch.float32)
    if states is not None and chosen:
        picked = states.float().index_select(0, _documents(plan, chosen, out.device))
        out.index_copy_(0, index_tensor(chosen, out.device), picked)
    return out


def _to_documents(plan: RankPlan, states: Tensor, chosen: list[int], count: int, through: Tensor | None) -> Tensor:
    """[count, HV, K, V]: states of the chosen segments at their documents; empty documents pass `through` on rank 0."""
    out = states.new_zeros(count, *states.shape[1:])
    if chosen:
        out.index_copy_(
            0, _documents(plan, chosen, out.device), states.index_select(0, index_tensor(chosen, out.device))
        )
    empty = [d for d, links in enumerate(plan.chains) if not links]
    if through is not None and empty and plan.rank == 0:
        which = index_tensor(empty, out.device)
        out.index_copy_(0, which, through.float().index_select(0, which))
    return out


def _runs_of(device: torch.device) -> tuple[type[ForwardRun], type[BackwardRun]]:
    if triton_ready(device):
        from .launch import DeviceBackwardRun, DeviceForwardRun

        return DeviceForwardRun, DeviceBackwardRun
    return ForwardRun, BackwardRun


def _kcp_forward(
    q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets, map_rows, *,
    scale=None, output_final_state=False, use_qk_l2norm=False, save_mode="light", group_name="", exchange="ring",
) -> _Tensors:  # fmt: skip
    _check_inputs(q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets)
    plan = decode_plan(table)
    shape = (v.shape[2], k.shape[3], v.shape[3])
    x = Inputs(q, k, v, g, beta, segments, chunk_offsets, scale, use_qk_l2norm)
    run = _runs_of(q.device)[0](plan, x, save_mode)
    places = list(enumerate(plan.segments))
    starts = _between(plan, initial_state, [i for i, s in places if s.first], shape, q)
    walks = plan.forward_walks
    sent = walks.sent
    values = run.values([i for i, s in places if not s.last and i not in sent], starts)
    mapped = [i for i, s in places if needs_map(s)]
    maps = run.maps(mapped)
    chain = _Chain(plan, values, dict(zip(mapped, maps, strict=True)), adjoint=False)
    flow = Exchange(plan, plan.chains, shape, q, group_name, exchange)
    _walk_all(run, chain, flow, plan.chains, walks, starts)
    final = starts.new_zeros(0, *shape)
    if output_final_state:
        closing = [i for i, s in places if s.last]
        final = _to_documents(plan, run.ends, closing, pack.shape[0] - 1, initial_state)
    return run.o, final, starts, _flatten_maps(maps), *run.tapes


def _kcp_backward(
    do, dfinal_state, q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets, starts, maps,
    gcum, k_rstd, qscale, x, h, delta, *,
    scale=None, use_qk_l2norm=False, group_name="", exchange="ring",
) -> _Tensors:  # fmt: skip
    plan = decode_plan(table)
    shape = (v.shape[2], k.shape[3], v.shape[3])
    inputs = Inputs(q, k, v, g, beta, segments, chunk_offsets, scale, use_qk_l2norm)
    run = _runs_of(q.device)[1](plan, inputs, do, starts, Tapes(gcum, k_rstd, qscale, x, h, delta))
    places = list(enumerate(plan.segments))
    ends = _between(plan, dfinal_state, [i for i, s in places if s.last], shape, q)
    walks = plan.adjoint_walks
    sent = walks.sent
    values = run.values([i for i, s in places if not s.first and i not in sent], ends)
    mapped = [i for i, s in places if needs_map(s)]
    unflat = maps[:-SPARE].view(len(mapped), shape[0], shape[1], shape[1])
    transposed = {i: m.mT.contiguous() for i, m in zip(mapped, unflat, strict=True)}
    chain = _Chain(plan, values, transposed, adjoint=True)
    chains = [links[::-1] for links in plan.chains]
    flow = Exchange(plan, chains, shape, q, group_name, exchange)
    _walk_all(run, chain, flow, chains, walks, ends)
    grads = run.gradients()
    dinitial = starts.new_zeros(0, *shape)
    if initial_state is not None:
        opening = [i for i, s in places if s.first]
        dinitial = _to_documents(plan, run.dstarts, opening, pack.shape[0] - 1, dfinal_state)
    return *grads, dinitial


def _kcp_forward_fake(
    q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets, map_rows, *,
    scale=None, output_final_state=False, use_qk_l2norm=False, save_mode="light", group_name="", exchange="ring",
) -> _Tensors:  # fmt: skip
    _check_inputs(q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets)
    HV, K, V, S = v.shape[2], k.shape[3], v.shape[3], segments.shape[0] - 1
    starts = q.new_empty(S, HV, K, V, dtype=torch.float32)
    o, _, *tapes = torch.ops.ple_gdn.gated_delta_rule(
        q, k, v, g, beta, starts, segments, chunk_offsets, None,
        scale=scale, use_qk_l2norm=use_qk_l2norm, save_mode=save_mode,
    )  # fmt: skip
    tapes = without_starts(Tapes(*tapes))
    final = starts.new_empty(pack.shape[0] - 1 if output_final_state else 0, HV, K, V)
    return o, final, starts, starts.new_empty((map_rows.shape[0] - SPARE) * HV * K * K + SPARE), *tapes


def _kcp_backward_fake(
    do, dfinal_state, q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets, starts, maps,
    gcum, k_rstd, qscale, x, h, delta, *,
    scale=None, use_qk_l2norm=False, group_name="", exchange="ring",
) -> _Tensors:  # fmt: skip
    grads = [t.new_empty(t.shape) for t in (q, k, v, g, beta)]
    shape = (pack.shape[0] - 1 if initial_state is not None else 0, *starts.shape[1:])
    return *grads, starts.new_empty(shape)


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    starts, maps, *tapes = output[2:]
    ctx.mark_non_differentiable(starts, maps, *tapes)
    ctx.set_materialize_grads(False)
    q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets, _ = inputs
    ctx.save_for_backward(q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets, starts, maps, *tapes)
    ctx.keywords = {n: keyword_only_inputs[n] for n in ("scale", "use_qk_l2norm", "group_name", "exchange")}


def _autograd(ctx, do, dfinal_state, *_tape_grads):
    saved = ctx.saved_tensors
    v, initial_state = saved[2], saved[5]
    if do is None:
        do = torch.zeros_like(v, dtype=saved[0].dtype)
    *grads, dinitial = torch.ops.ple_gdn.kcp_gated_delta_rule_backward(do, dfinal_state, *saved, **ctx.keywords)
    return *grads, dinitial if initial_state is not None else None, None, None, None, None, None


kcp_gated_delta_rule_op = register_op("kcp_gated_delta_rule", _kcp_forward, _kcp_forward_fake)
kcp_gated_delta_rule_op.register_autograd(_autograd, setup_context=_setup_context)
register_op("kcp_gated_delta_rule_backward", _kcp_backward, _kcp_backward_fake)
