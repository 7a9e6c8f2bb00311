"""The backward of a call span by span, last to first, in buffers of one span; `spans.py` says where they lie.

    operands    row table and scores of the span's chunks
    walks       its chains backwards, from the adjoint carried over; its legs replayed side by side
    gradients   of its chunks

Every bit is that of one span: a state or adjoint goes over a boundary in fp32, as it goes from chunk to chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..triton_launch import launch
from ..varlen import CHUNK
from . import configs
from .chunk_gradients import Tapes as GradientTapes
from .chunk_gradients import chunk_gradients
from .span_tables import span_tables_kernel
from .spans import SpanPlan, start_count
from .walks import Chunks, Documents, Span, backward_walks, forward_walk

if TYPE_CHECKING:
    from .arena import Arena
    from .launch import Problem

Tensor = torch.Tensor


class Call(NamedTuple):
    """Inputs of a backward and what it fills.

    `tapes` are gcum, k_rstd, qscale and x, yet to be made with `rebuild`; `gradients` are dq, dk, dv, dg and dbeta.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor
    dht: Tensor | None
    h0: Tensor | None
    cu: Tensor | None
    offsets: Tensor | None
    tapes: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    dh0: Tensor
    scale: float
    l2norm: bool
    rebuild: bool


class Buffers(NamedTuple):
    """Temporaries of one span, and of all: the tables, the carried adjoint (two, read and written in turn), the start
    states. h, delta and dh are by chunk of the span."""

    table: Tensor
    scores: Tensor
    h: Tensor
    delta: Tensor
    dh: Tensor
    carry: Tensor
    tables: Tensor
    starts: Tensor
    missing: bool  # the start states are yet to be made

    @classmethod
    def bind(cls, p: Problem, plan: SpanPlan, arena: Arena, starts: Tensor | None) -> Buffers:
        rows, state = plan.rows, (p.HV, p.K, p.V)
        tiles = {
            "row_table": ((rows, p.HV, 5 * CHUNK), torch.float32),
            "scores": ((rows, p.HV, CHUNK, CHUNK), p.dtype),
            "h": ((rows, *state), p.dtype),
            "delta": ((rows * CHUNK, p.HV, p.V), p.dtype),
            "dh": ((rows, *state), p.dtype),
            "carry": ((2, *state), torch.float32),
            "span_tables": ((plan.count, sum(plan.widths)), torch.int32),
        }
        bound = [arena.bind(name, shape, dtype) for name, (shape, dtype) in tiles.items()]
        missing = starts is None
        if missing:
            starts = arena.bind("starts", (start_count(p.B * p.T), *state), torch.float32)
        return cls(*bound, starts, missing)


def backward_in_spans(p: Problem, plan: SpanPlan, call: Call, buffers: Buffers) -> None:
    """Fills the gradients of every document's rows and `dh0`."""
    if call.h0 is not None:  # what an empty document, which has no chain, gets
        call.dh0.zero_() if call.dht is None else call.dh0.copy_(call.dht)
    spans = _tables(p, plan, call, buffers.tables)
    # The parts are documents of one row.
    part = p._replace(B=1, T=p.B * p.T, documents=plan.chains, chunks=plan.rows, varlen=True)
    if buffers.missing:
        for chains, _ in spans:
            _keep_starts(part, call, buffers, chains)
    carried, carry = buffers.carry.unbind(0)
    for chains, legs in reversed(spans):
        _one_span(part, call, buffers, chains, Span(legs, buffers.starts, carried, carry))
        carried, carry = carry, carried


def _tables(p: Problem, plan: SpanPlan, call: Call, out: Tensor) -> list[tuple[Documents, Documents]]:
    """Chains and legs of every span."""
    sizes = (p.documents, p.T, p.chunks_per_row, plan.length, plan.chains, plan.legs)
    launch(
        span_tables_kernel, plan.count, (call.cu, call.offsets, out, *sizes), p.device, LEG=configs.SPANS.leg,
        VARLEN=p.varlen, BLOCK=128, num_warps=4,
    )  # fmt: skip
    spans, widths = [], plan.widths
    for row in out.unbind(0):
        tokens, chunks, source, end, target, *legs = row.split_with_sizes(widths)
        chains = Documents(plan.chains, tokens, chunks, source, end, target, plan.together)
        spans.append((chains, Documents(plan.legs, *legs)))
    return spans


def _operands(part: Problem, call: Call, buffers: Buffers, chains: Documents, inverse: bool) -> Chunks:
    from .launch import make_operands

    make_operands(
        part, call.q, call.k, call.g, call.beta, chains.cu, chains.offsets, call.tapes, buffers.table, buffers.scores,
        call.scale, call.l2norm, inverse=inverse,
    )  # fmt: skip
    return Chunks(call.q, call.k, call.v, buffers.table, buffers.scores, call.tapes[3])


def _keep_starts(part: Problem, call: Call, buffers: Buffers, chains: Documents) -> None:
    """The forward's walk of a span for its start states, and before it the tapes that are missing."""
    chunks = _operands(part, call, buffers, chains, call.rebuild)
    forward_walk(
        part, chunks, chains, call.h0, call.gradients[2], call.dh0, buffers.h, buffers.delta, store_final=False,
        store_h=False, output=False, starts=buffers.starts, leg=configs.SPANS.leg,
    )  # fmt: skip


def _one_span(part: Problem, call: Call, buffers: Buffers, chains: Documents, span: Span) -> None:
    chunks = _operands(part, call, buffers, chains, False)
    h, delta, dh = buffers.h, buffers.delta, buffers.dh
    backward_walks(
        part, chunks, chains, call.do, call.dht, call.h0, dh, call.gradients[2], call.dh0, h, delta,
        store_dh0=call.h0 is not None, replay=True, span=span,
    )  # fmt: skip
    tapes = GradientTapes(call.q, call.k, buffers.table, *call.tapes[1:3], h, delta)
    chunk_gradients(part, tapes, chains, call.do, dh, call.gradients, call.scale, call.l2norm)
