"""Gated delta rule over a rank's shard: summaries, exchange, walk; and the adjoint.

The local run treats every segment as a document of its own whose start state was exchanged. A segment that closes its
document needs no summary, one that opens it no map (GDN.md §4). All states and maps are fp32.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ..gated_delta_rule.checks import check_inputs
from ..register import register_op
from ..validation import FLOATS, check_device, check_dtype, check_rank, check_shape
from .exchange import StateMap, exchange_states
from .plan import RankPlan, Segment, decode_plan, needs_map

_Tensors = tuple[torch.Tensor, ...]


def _gather(x: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
    return torch.cat([x[:, s.start : s.end] for s in segments], dim=1)


def _bounds(segments: list[Segment], device: torch.device) -> torch.Tensor:
    lengths = torch.tensor([0, *(s.end - s.start for s in segments)], dtype=torch.int64)
    return lengths.cumsum(0).to(device, non_blocking=True)


def _segment_values(plan, q, k, v, g, beta, initial_state, scale, l2norm) -> dict[int, torch.Tensor]:
    """End state of every segment that does not close its document, from a zero start (from h0 where it opens it)."""
    chosen = [(i, s) for i, s in enumerate(plan.segments) if not s.last]
    if not chosen:
        return {}
    segments = [s for _, s in chosen]
    starts = q.new_zeros(len(segments), v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    if initial_state is not None:
        for row, s in enumerate(segments):
            if s.first:
                starts[row] = initial_state[plan.fragments[s.fragment].document]
    q, k, v, g, beta = (_gather(x, segments) for x in (q, k, v, g, beta))
    ends = torch.ops.ple_gdn.gated_delta_rule(
        q, k, v, g, beta, starts, _bounds(segments, q.device), None, None,
        scale=scale, output_final_state=True, use_qk_l2norm=l2norm, save_mode="none",
    )[1]  # fmt: skip
    return {i: ends[row] for row, (i, _) in enumerate(chosen)}


def _segment_maps(plan: RankPlan, k, v, g, beta, l2norm) -> torch.Tensor:
    """M of the segments that neither open nor close their document, [n, HV, K, K] fp32.

    M is where the identity goes when nothing is written (v = 0); keys are upcast, so it is exact to fp32 (BUGS A3).
    """
    segments = [s for s in plan.segments if needs_map(s)]
    HV, K = v.shape[2], k.shape[3]
    if not segments:
        return k.new_empty(0, HV, K, K, dtype=torch.float32)
    k, g, beta = _gather(k, segments).float(), _gather(g, segments), _gather(beta, segments)
    eye = torch.eye(K, dtype=torch.float32, device=k.device).expand(len(segments), HV, K, K).contiguous()
    zeros = k.new_zeros(1, k.shape[1], HV, K)
    return torch.ops.ple_gdn.gated_delta_rule(
        k, k, zeros, g, beta, eye, _bounds(segments, k.device), None, None,
        scale=1.0, output_final_state=True, use_qk_l2norm=l2norm, save_mode="none",
    )[1]  # fmt: skip


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


class _Chain:
    """Local segments of each fragment in the order states flow, with their maps: folds to fragment maps and starts."""

    def __init__(self, plan: RankPlan, values: dict[int, torch.Tensor], maps: dict[int, torch.Tensor], adjoint: bool):
        self.plan, self.values, self.maps = plan, values, maps
        self.fragments: dict[int, list[int]] = {}
        for i, s in enumerate(plan.segments):
            self.fragments.setdefault(s.fragment, []).append(i)
        if adjoint:
            self.fragments = {f: rows[::-1] for f, rows in self.fragments.items()}
        self.chains = [c[::-1] for c in plan.chains] if adjoint else list(plan.chains)

    def _map(self, i: int) -> StateMap:
        return StateMap(self.values[i], self.maps.get(i))

    def fragment_maps(self) -> dict[int, StateMap]:
        """Fold of each local fragment that hands a state on to another rank."""
        handing_on = {i for chain in self.chains for i in chain[:-1]}
        out = {}
        for fragment, rows in self.fragments.items():
            if fragment not in handing_on:
                continue
            total = self._map(rows[0])
            for i in rows[1:]:
                total = self._map(i).after(total)
            out[fragment] = total
        return out

    def starts(self, entering: dict[int, torch.Tensor], opening: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """State that enters each local segment. `opening`: of those that open the flow of their document."""
        out = {}
        for fragment, rows in self.fragments.items():
            opens = fragment not in entering
            state = opening[rows[0]] if opens else entering[fragment]
            out[rows[0]] = state
            for before, i in pairwise(rows):
                step = self._map(before)
                state = step.value if step.map is None else step.apply(state)
                out[i] = state
        return out


def _stack(plan: RankPlan, states: dict[int, torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
    return torch.stack([states[i] for i in range(len(plan.segments))]) if plan.segments else empty


def _kcp_forward(
    q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets, map_rows, *,
    scale=None, output_final_state=False, use_qk_l2norm=False, save_mode="light", group_name="", exchange="ring",
) -> _Tensors:  # fmt: skip
    _check_inputs(q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets)
    plan = decode_plan(table)
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    values = _segment_values(plan, q, k, v, g, beta, initial_state, scale, use_qk_l2norm)
    maps = _segment_maps(plan, k, v, g, beta, use_qk_l2norm)
    mapped = [i for i, s in enumerate(plan.segments) if needs_map(s)]
    chain = _Chain(plan, values, dict(zip(mapped, maps, strict=True)), adjoint=False)
    entering = exchange_states(plan, chain.chains, chain.fragment_maps(), (HV, K, V), q, group_name, exchange)
    zero = q.new_zeros(HV, K, V, dtype=torch.float32)
    opening = {
        i: zero if initial_state is None else initial_state[plan.fragments[s.fragment].document].float()
        for i, s in enumerate(plan.segments)
        if s.first
    }
    starts = _stack(plan, chain.starts(entering, opening), zero.new_empty(0, HV, K, V))
    o, ends, *tapes = torch.ops.ple_gdn.gated_delta_rule(
        q, k, v, g, beta, starts, segments, chunk_offsets, None,
        scale=scale, output_final_state=output_final_state, use_qk_l2norm=use_qk_l2norm, save_mode=save_mode,
    )  # fmt: skip
    final = zero.new_zeros(pack.shape[0] - 1 if output_final_state else 0, HV, K, V)
    if output_final_state:
        for i, s in enumerate(plan.segments):
            if s.last:
                final[plan.fragments[s.fragment].document] = ends[i]
        if initial_state is not None and plan.rank == 0:
            for document, fragments in enumerate(plan.chains):
                if not fragments:
                    final[document] = initial_state[document]
    return o, final, starts, maps, *tapes


def _kcp_backward(
    do, dfinal_state, q, k, v, g, beta, initial_state, pack, table, segments, chunk_offsets, starts, maps,
    gcum, k_rstd, qscale, x, h, delta, *,
    scale=None, use_qk_l2norm=False, group_name="", exchange="ring",
) -> _Tensors:  # fmt: skip
    plan = decode_plan(table)
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    zero = q.new_zeros(HV, K, V, dtype=torch.float32)
    closing = {
        i: zero if dfinal_state is None else dfinal_state[plan.fragments[s.fragment].document].float()
        for i, s in enumerate(plan.segments)
        if s.last
    }
    values = _segment_adjoints(plan, do, closing, q, k, v, g, beta, starts, scale, use_qk_l2norm)
    mapped = [i for i, s in enumerate(plan.segments) if needs_map(s)]
    transposed = {i: m.transpose(-1, -2).contiguous() for i, m in zip(mapped, maps, strict=True)}
    chain = _Chain(plan, values, transposed, adjoint=True)
    entering = exchange_states(plan, chain.chains, chain.fragment_maps(), (HV, K, V), q, group_name, exchange)
    ends = _stack(plan, chain.starts(entering, closing), zero.new_empty(0, HV, K, V))
    *grads, dstarts = torch.ops.ple_gdn.gated_delta_rule_backward(
        do, ends, q, k, v, g, beta, starts, segments, chunk_offsets, None,
        gcum, k_rstd, qscale, x, h, delta, scale=scale, use_qk_l2norm=use_qk_l2norm,
    )  # fmt: skip
    dinitial = zero.new_zeros(pack.shape[0] - 1 if initial_state is not None else 0, HV, K, V)
    if initial_state is not None:
        for i, s in enumerate(plan.segments):
            if s.first:
                dinitial[plan.fragments[s.fragment].document] = dstarts[i]
        if dfinal_state is not None and plan.rank == 0:
            for document, fragments in enumerate(plan.chains):
                if not fragments:
                    dinitial[document] = dfinal_state[document]
    return *grads, dinitial


def _segment_adjoints(plan, do, closing, q, k, v, g, beta, starts, scale, l2norm) -> dict[int, torch.Tensor]:
    """Start-state gradient of every segment that does not open its document, with nothing entering from behind
    (the final-state gradient where the segment closes its document)."""
    chosen = [(i, s) for i, s in enumerate(plan.segments) if not s.first]
    if not chosen:
        return {}
    rows, parts = [i for i, _ in chosen], [s for _, s in chosen]
    zero = torch.zeros_like(starts[0])
    ends = torch.stack([closing.get(i, zero) for i in rows])
    do, q, k, v, g, beta = (_gather(t, parts) for t in (do, q, k, v, g, beta))
    none = [q.new_empty(0) for _ in range(6)]
    dstarts = torch.ops.ple_gdn.gated_delta_rule_backward(
        do, ends, q, k, v, g, beta, starts[rows], _bounds(parts, q.device), None, None, *none,
        scale=scale, use_qk_l2norm=l2norm,
    )[-1]  # fmt: skip
    return {i: dstarts[n] for n, i in enumerate(rows)}


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
    final = starts.new_empty(pack.shape[0] - 1 if output_final_state else 0, HV, K, V)
    return o, final, starts, starts.new_empty(map_rows.shape[0], HV, K, K), *tapes


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
