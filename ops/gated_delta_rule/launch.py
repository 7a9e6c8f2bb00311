"""Launchers of the CUDA path of the gated delta rule: shapes, temporaries, kernel order; nothing reads the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..layout import packed
from ..triton_launch import launch
from ..varlen import CHUNK
from . import configs, repeats
from .arena import Arena
from .backward_spans import Buffers, Call, backward_in_spans
from .chunk_gradients import Tapes as GradientTapes
from .chunk_gradients import chunk_gradients
from .configs import SM_COUNT, block_width, select
from .packing_kernels import check_packing_kernel, zero_gradient_tail_kernel, zero_output_tail_kernel
from .pieces import Pieces
from .prep import prep_kernel
from .scores import score_kernel
from .spans import SpanPlan, plan_spans, start_count
from .walks import Chunks, Documents, backward_walks, forward_walk, uses_hopper_operands

Tensor = torch.Tensor


class Problem(NamedTuple):
    """Host-known sizes; `chunks` bounds the chunk count without reading `cu_seqlens`."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    documents: int
    chunks: int
    chunks_per_row: int
    varlen: bool
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Problem:
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        per_row = -(-T // CHUNK)
        documents = B if cu_seqlens is None else cu_seqlens.numel() - 1
        chunks = B * per_row if cu_seqlens is None else T // CHUNK + documents
        return cls(B, T, H, HV, K, V, documents, chunks, per_row, cu_seqlens is not None, q.dtype, q.device)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    @property
    def spans(self) -> SpanPlan:
        shape = (self.HV, self.K, self.V, self.dtype.itemsize)
        return plan_spans(self.B * self.T, self.documents, self.chunks, *shape, self.cut)

    @property
    def cut(self) -> int | None:
        """Chunks of the pieces that documents are walked in, if they are."""
        return configs.piece_length(self.T, self.dtype.itemsize, self.HV, self.K, self.V)

    @property
    def dot(self) -> str:
        """tf32x3 keeps fp32 operands to 2^-21; 16-bit operands ignore it."""
        return "tf32x3"


def _packing(
    p: Problem, cu_seqlens: Tensor | None, chunk_offsets: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Boundaries on the device, contiguous, chunk offsets built where absent."""
    if cu_seqlens is None:
        return None, None
    cu = cu_seqlens.to(p.device, non_blocking=True).contiguous()
    if chunk_offsets is None:
        counts = (cu.diff() + (CHUNK - 1)) // CHUNK
        offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    else:
        offsets = chunk_offsets.to(p.device, non_blocking=True).contiguous()
    return cu, offsets


def _check_packing(p: Problem, cu: Tensor | None, offsets: Tensor | None) -> None:
    """A device assert on the boundaries."""
    if cu is not None:
        launch(check_packing_kernel, 1, (cu, offsets, p.documents, p.T), p.device, BLOCK=1024, num_warps=4)


def _prep(p: Problem, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, cu: Tensor | None, offsets: Tensor | None,
          tapes: tuple[Tensor, Tensor, Tensor, Tensor], scale: float, l2norm: bool) -> None:  # fmt: skip
    config = select(p.dtype.itemsize, p.K, p.V).prep
    arguments = (q, k, g, beta, cu, offsets, *tapes, scale, p.documents, p.T, p.chunks_per_row)
    launch(
        prep_kernel, p.chunks * p.H, arguments, p.device, H=p.H, HV=p.HV, K=p.K, BLOCK=config.BLOCK, VARLEN=p.varlen,
        L2NORM=l2norm, PREC="tf32x3", DOT=p.dot, num_warps=config.num_warps,
    )  # fmt: skip


def make_operands(
    p: Problem, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, cu: Tensor | None, offsets: Tensor | None,
    tapes: tuple[Tensor, ...], table: Tensor, scores: Tensor, scale: float, l2norm: bool, *, inverse: bool,
) -> None:  # fmt: skip
    """Everything of the chunks that needs no state: the four tapes (`inverse`), row table and score tiles."""
    if uses_hopper_operands(p):
        from .hopper_operands import launch_operands

        return launch_operands(p, q, k, g, beta, cu, offsets, tapes, table, scores, scale, l2norm, inverse)
    if inverse:
        _prep(p, q, k, g, beta, cu, offsets, tapes, scale, l2norm)
    _scores(p, q, k, g, beta, cu, offsets, tapes, table, scores)


def _prep_tapes(p: Problem, arena: Arena | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gcum, k_rstd, qscale and x: outputs, or temporaries of the arena."""
    shapes = {
        "gcum": ((p.B, p.T, p.HV), torch.float32),
        "k_rstd": ((p.B, p.T, p.H), torch.float32),
        "qscale": ((p.B, p.T, p.H), torch.float32),
        "x": ((p.B, p.T, p.HV, CHUNK), p.dtype),
    }
    if arena is None:
        return tuple(p.new(*shape, dtype=dtype) for shape, dtype in shapes.values())
    return tuple(arena.bind(name, shape, dtype) for name, (shape, dtype) in shapes.items())


def _walk_buffers(p: Problem, arena: Arena) -> tuple[Tensor, Tensor]:
    """Row table and score tiles of every chunk: temporaries of both directions."""
    table = arena.bind("row_table", (p.chunks, p.HV, 5 * CHUNK), torch.float32)
    return table, arena.bind("scores", (p.chunks, p.HV, CHUNK, CHUNK), p.dtype)


def _scores(p: Problem, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, cu: Tensor | None, offsets: Tensor | None,
            tapes: tuple[Tensor, ...], table: Tensor, scores: Tensor) -> None:  # fmt: skip
    arguments = (q, k, g, beta, *tapes[:3], cu, offsets, table, scores, p.documents, p.T, p.chunks_per_row)
    launch(
        score_kernel, p.chunks * p.H, arguments, p.device, H=p.H, HV=p.HV, K=p.K, BK=block_width(p.K), VARLEN=p.varlen,
        DOT=p.dot, num_warps=4,
    )  # fmt: skip


class _Forward(NamedTuple):
    """Inputs of a forward, dense, and what it fills: what is absent or not wanted is None or empty. `tapes` are
    gcum, k_rstd, qscale and x, None where they are temporaries."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    h0: Tensor | None
    cu: Tensor | None
    offsets: Tensor | None
    o: Tensor
    final: Tensor
    tapes: tuple[Tensor, ...] | None
    h: Tensor
    starts: Tensor
    delta: Tensor
    scale: float
    l2norm: bool
    store_final: bool
    save_mode: str
    output: bool


def _forward(p: Problem, call: _Forward, arena: Arena) -> None:
    """All launches of a forward."""
    cu, offsets, full = call.cu, call.offsets, call.save_mode == "full"
    tapes = _prep_tapes(p, arena) if call.tapes is None else call.tapes
    table, scores = _walk_buffers(p, arena)
    _check_packing(p, cu, offsets)
    make_operands(
        p, call.q, call.k, call.g, call.beta, cu, offsets, tapes, table, scores, call.scale, call.l2norm, inverse=True
    )
    chunks, documents = Chunks(call.q, call.k, call.v, table, scores, tapes[3]), Documents(p.documents, cu, offsets)
    filled = call.o if call.output else call.delta
    if p.cut is not None:
        pieces = Pieces(p, p.cut, documents, chunks, tapes[1], call.l2norm, arena)
        documents = pieces.walked(pieces.starts(call.h0, filled))
    keeps_starts = call.save_mode == "light" and start_count(p.B * p.T) > 1
    forward_walk(
        p, chunks, documents, call.h0, call.o, call.final, call.h, call.delta, store_final=call.store_final,
        store_h=full, output=call.output, starts=call.starts, leg=configs.SPANS.leg if keeps_starts else 0,
    )  # fmt: skip
    if p.varlen:
        launch(
            zero_output_tail_kernel, SM_COUNT, (cu, filled, *tapes, call.delta, p.documents, p.T), p.device,
            WIDTH=p.HV * p.V, HV=p.HV, H=p.H, FULL=full, BLOCK=1024,
        )  # fmt: skip


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, chunk_offsets: Tensor | None, workspace: Tensor | None,
    scale: float | None, output_final_state: bool, use_qk_l2norm: bool, save_mode: str, output: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(o, final_state, gcum, k_rstd, qscale, x, h, delta); what `save_mode` does not keep is empty, and "light" keeps
    start states as h. `output=False` makes no o either (empty), for a caller that wants the tapes of "full"."""
    q, k, v, g, beta = (packed(t) for t in (q, k, v, g, beta))
    p = Problem.of(q, v, cu_seqlens)
    scale = p.K**-0.5 if scale is None else scale
    o = p.new(*(v.shape if output else (0,)))
    states = (p.documents, p.HV, p.K, p.V)
    final = p.new(*(states if output_final_state else (0,)), dtype=torch.float32)
    full = save_mode == "full"
    h = p.new(*((p.chunks, p.HV, p.K, p.V) if full else (0,)))
    starts = p.new(start_count(p.B * p.T) * p.HV * p.K * p.V if save_mode == "light" else 0, dtype=torch.float32)
    delta = p.new(*(v.shape if full else (0,)))
    tapes = None if save_mode == "none" else _prep_tapes(p, None)
    if p.documents == 0 or p.T == 0:
        o.zero_()
        if output_final_state:
            final.copy_(initial_state) if initial_state is not None else final.zero_()
    else:
        h0 = None if initial_state is None else packed(initial_state)
        inputs = (q, k, v, g, beta, h0, *_packing(p, cu_seqlens, chunk_offsets))
        options = (scale, use_qk_l2norm, output_final_state, save_mode, output)
        call = _Forward(*inputs, o, final, tapes, h, starts, delta, *options)
        made = (o, final, h, starts, delta, *(tapes or ()))
        repeats.run(("forward", *options), inputs, made, workspace, p.device, lambda arena: _forward(p, call, arena))
    if tapes is None:
        tapes = tuple(p.new(0, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.float32, p.dtype))
    return o, final, *tapes, starts if save_mode == "light" else h, delta


def _buffers(p: Problem, arena: Arena, h: Tensor, delta: Tensor, replay: bool) -> tuple[Tensor, ...]:
    """Row table, scores, h, delta and dh of all chunks; h and delta are the tapes, or temporaries to replay them in."""
    table, scores = _walk_buffers(p, arena)
    if replay:
        h = arena.bind("h", (p.chunks, p.HV, p.K, p.V), p.dtype)
        delta = arena.bind("delta", (p.B, p.T, p.HV, p.V), p.dtype)
    return table, scores, h, delta, arena.bind("dh", (p.chunks, p.HV, p.K, p.V), p.dtype)


def _backward_whole(p: Problem, call: Call, arena: Arena, h: Tensor, delta: Tensor) -> None:
    """All chunks at once, from h and delta, or with a replay of those that were not kept."""
    q, k, v, tapes, l2norm = call.q, call.k, call.v, call.tapes, call.l2norm
    replay = h.dim() == 1 or delta.dim() == 1
    table, scores, h, delta, dh = _buffers(p, arena, h, delta, replay)
    make_operands(
        p, q, k, call.g, call.beta, call.cu, call.offsets, tapes, table, scores, call.scale, l2norm,
        inverse=call.rebuild,
    )  # fmt: skip
    documents, chunks = Documents(p.documents, call.cu, call.offsets), Chunks(q, k, v, table, scores, tapes[3])
    walked = documents
    if p.cut is not None:
        pieces = Pieces(p, p.cut, documents, chunks, tapes[1], l2norm, arena)
        states = pieces.starts(call.h0, call.gradients[2]) if replay else None
        walked = pieces.walked(states, pieces.ends(call.do, call.dht))
    backward_walks(
        p, chunks, walked, call.do, call.dht, call.h0,
        dh, call.gradients[2], call.dh0, h, delta, store_dh0=call.h0 is not None, replay=replay,
    )  # fmt: skip
    kept = GradientTapes(q, k, call.g, table, *tapes[1:3], h, delta)
    chunk_gradients(p, kept, documents, call.do, dh, call.gradients, call.scale, l2norm)


def _backward(p: Problem, call: Call, arena: Arena, h: Tensor, delta: Tensor, in_spans: bool) -> None:
    """All launches of a backward, given the tapes of `call` unless they are to be rebuilt."""
    if call.rebuild:
        call = call._replace(tapes=_prep_tapes(p, arena))
    _check_packing(p, call.cu, call.offsets)
    if in_spans:
        plan = p.spans
        starts = h if h.dim() == 1 and h.numel() and not call.rebuild else None
        backward_in_spans(p, plan, call, Buffers.bind(p, plan, arena, starts), arena)
    else:
        _backward_whole(p, call, arena, h, delta)
    if p.varlen:
        launch(
            zero_gradient_tail_kernel, SM_COUNT, (call.cu, *call.gradients, p.documents, p.T), p.device,
            KEY_WIDTH=p.H * p.K, VALUE_WIDTH=p.HV * p.V, HV=p.HV, BLOCK=1024,
        )  # fmt: skip


def launch_backward(
    do: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_offsets: Tensor | None, workspace: Tensor | None,
    gcum: Tensor, k_rstd: Tensor, qscale: Tensor, x: Tensor, h: Tensor, delta: Tensor,
    scale: float | None, use_qk_l2norm: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv, dg, dbeta, dinitial_state); empty tapes are rebuilt with the bits the forward would have stored.

    Past a size, or given start states (an h of one axis), it works in spans unless h and delta were kept.
    """
    do, q, k, v, g, beta = (packed(t) for t in (do, q, k, v, g, beta))
    p = Problem.of(q, v, cu_seqlens)
    scale = p.K**-0.5 if scale is None else scale
    dq, dk, dv, dbeta = (p.new(*t.shape, dtype=t.dtype) for t in (q, k, v, beta))
    dg = p.new(*g.shape, dtype=torch.float32)
    gradients = (dq, dk, dv, dg, dbeta)
    has_h0 = initial_state is not None
    dh0 = p.new(*((p.documents, p.HV, p.K, p.V) if has_h0 else (0,)), dtype=torch.float32)
    empty = p.documents == 0 or p.T == 0
    in_spans = not empty and (h.dim() == 1 or delta.dim() == 1) and p.spans.count > 1
    if has_h0 and (empty or in_spans):  # in spans an empty document has no chain
        dh0.zero_() if dfinal_state is None else dh0.copy_(dfinal_state)
    if empty:
        for gradient in gradients:
            gradient.zero_()
        return *gradients, dh0
    h0 = packed(initial_state) if has_h0 else None
    dht = None if dfinal_state is None else packed(dfinal_state)
    inputs = (q, k, v, g, beta, do, dht, h0, *_packing(p, cu_seqlens, chunk_offsets))
    tapes = (gcum, k_rstd, qscale, x)
    rebuild = any(tape.dim() == 1 for tape in tapes)
    call = Call(*inputs, tapes, gradients, dh0, scale, use_qk_l2norm, rebuild)
    repeats.run(
        ("backward", scale, use_qk_l2norm), (*inputs, *tapes, h, delta), (*gradients, dh0), workspace, p.device,
        lambda arena: _backward(p, call, arena, h, delta, in_spans),
    )  # fmt: skip
    return *gradients, dh0
