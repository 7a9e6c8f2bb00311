"""The backward of a call span by span, last to first, in buffers of one span; `spans.py` says where they lie.

    operands    row table and scores of the span's chunks; those of all are there already where documents are in pieces
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
from .pieces import Pieces
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
        most = rows if plan.cut is None else p.chunks  # summaries and maps go before all spans
        tiles = {
            "row_table": ((most, p.HV, 5 * CHUNK), torch.float32),
            "scores": ((most, p.HV, CHUNK, CHUNK), p.dtype),
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


def backward_in_spans(p: Problem, plan: SpanPlan, call: Call, buffers: Buffers, arena: Arena) -> None:
    """Fills the gradients of every document's rows, and `dh0` of all documents that have any."""
    spans = _tables(p, plan, call, buffers.tables)
    # The parts are documents of one row.
    part = p._replace(B=1, T=p.B * p.T, documents=plan.chains, chunks=plan.rows, varlen=True)
    ends = None if plan.cut is None else _between_pieces(p, plan.cut, call, buffers, arena)
    if buffers.missing and ends is None:
        for chains, _ in spans:
            _keep_starts(part, call, buffers, chains)
    carried, carry = buffers.carry.unbind(0)
    for i, (chains, legs) in reversed([*enumerate(spans)]):
        span = Span(legs, buffers.starts, carried if ends is None else ends, carry)
        if ends is None:
            chunks = _operands(part, call, buffers, chains, False)
        else:
            own = slice(i * plan.length, i * plan.length + plan.rows)
            chunks = Chunks(call.q, call.k, call.v, buffers.table[own], buffers.scores[own], call.tapes[3])
        _one_span(part, call, buffers, chunks, chains, span)
        carried, carry = carry, carried


def _between_pieces(p: Problem, cut: int, call: Call, buffers: Buffers, arena: Arena) -> Tensor:
    """Adjoints at the ends of all pieces, and where they are missing the start states of the legs."""
    documents = Documents(p.documents, call.cu, call.offsets)
    chunks = _operands(p, call, buffers, documents, call.rebuild)
    pieces = Pieces(p, cut, documents, chunks, call.tapes[1], call.l2norm, arena)
    if buffers.missing:
        walked, unused = pieces.walked(pieces.starts(call.h0, call.gradients[2])), call.gradients[2]
        forward_walk(
            p, chunks, walked, call.h0, unused, call.dh0, buffers.h, buffers.delta, store_final=False, store_h=False,
            output=False, starts=buffers.starts, leg=configs.SPANS.leg,
        )  # fmt: skip
    return pieces.ends(call.do, call.dht)


def _tables(p: Problem, plan: SpanPlan, call: Call, out: Tensor) -> list[tuple[Documents, Documents]]:
    """Chains and legs of every span."""
    sizes = (p.documents, p.T, p.chunks_per_row, plan.length, plan.chains, plan.legs)
    launch(
        span_tables_kernel, plan.count, (call.cu, call.offsets, out, *sizes), p.device, LEG=configs.SPANS.leg,
        CUT=plan.cut or 0, VARLEN=p.varlen, BLOCK=128, num_warps=4,
    )  # fmt: skip
    spans, widths = [], plan.widths
    for row in out.unbind(0):
        tokens, chunks, source, end, target, *legs = row.split_with_sizes(widths)
        chains = Documents(plan.chains, tokens, chunks, source, end, target)
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


def _one_span(part: Problem, call: Call, buffers: Buffers, chunks: Chunks, chains: Documents, span: Span) -> None:
    h, delta, dh = buffers.h, buffers.delta, buffers.dh
    backward_walks(
        part, chunks, chains, call.do, call.dht, call.h0, dh, call.gradients[2], call.dh0, h, delta,
        store_dh0=call.h0 is not None, replay=True, span=span,
    )  # fmt: skip
    tapes = GradientTapes(call.q, call.k, call.g, chunks.table, *call.tapes[1:3], h, delta)
    chunk_gradients(part, tapes, chains, call.do, dh, call.gradients, call.scale, call.l2norm)
