"""Launches of both walks: one interface over the plain kernels of `scan.py` and the Hopper ones of `hopper_walks.py`.

Every path takes its walks from here: forward, backward, the tapes op, the segments of context parallelism. So all of
them walk with the same kernels, and tapes kept or replayed, packed or over ranks, have the same bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..triton_launch import RELEASE, launch
from ..varlen import CHUNK
from .configs import block_width, operands_for_hopper, select, walks_for_hopper
from .scan import adjoint_kernel, forward_kernel

if TYPE_CHECKING:
    from .launch import Problem

Tensor = torch.Tensor


class Chunks(NamedTuple):
    """What the walks read of every chunk: q, k, v, row table, score tiles and X."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    scores: Tensor
    x: Tensor


# What a walk takes: documents, pieces of them, or pieces for nothing but the state that they hand on (summaries).
WHOLE, PIECES, SUMMARIES = 0, 1, 2


class Documents(NamedTuple):
    """How many there are, their boundaries and chunk offsets on the device: None for the rows of a batch.

    Parts of a span are documents too, with lists of whose their states are (`span_tables`): `source` for a forward walk
    and `end` where it keeps start states, `end` and `target` for an adjoint one. `count` bounds them then.

    Pieces of documents (`pieces.py`): how many slots, a table instead of boundaries, the windows that summaries walk,
    the start states and the adjoints of the end states by slot [slots, HV, K, V] fp32, which a summary writes.
    """

    count: int
    cu: Tensor | None
    offsets: Tensor | None
    source: Tensor | None = None
    end: Tensor | None = None
    target: Tensor | None = None
    kind: int = WHOLE
    table: Tensor | None = None
    windows: Tensor | None = None
    states: Tensor | None = None
    adjoints: Tensor | None = None


class Span(NamedTuple):
    """What the backward walks of a span need besides its chains: the legs to replay with the states in front of them,
    and [HV, K, V] fp32 of the adjoint that comes from the span behind and of the one that goes on to the next."""

    legs: Documents
    starts: Tensor
    carried: Tensor
    carry: Tensor


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; the CPU, where kernels are interpreted, has none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def uses_hopper(p: Problem) -> bool:
    table_floats = p.chunks * p.HV * 5 * CHUNK
    return walks_for_hopper(p.dtype.itemsize, p.K, p.V, table_floats, _capability(p.device), RELEASE)


def uses_hopper_operands(p: Problem) -> bool:
    return operands_for_hopper(p.dtype.itemsize, p.K, _capability(p.device), RELEASE)


def forward_walk(
    p: Problem, chunks: Chunks, documents: Documents, h0: Tensor | None, o: Tensor, final: Tensor, h: Tensor,
    delta: Tensor, *, store_final: bool, store_h: bool, output: bool, starts: Tensor | None = None,
    leg: int = 0,
) -> None:  # fmt: skip
    """Fills o (`output`), the final states (`store_final`), h and delta (`store_h`); the rest may be empty.

    With `leg`, fills `starts` every so many chunks; without, parts of a span begin with them.
    """
    if uses_hopper(p):
        from . import hopper_walks

        return hopper_walks.forward_walk(
            p, chunks, documents, h0, o, final, h, delta, store_final=store_final, store_h=store_h, output=output,
            starts=starts, leg=leg,
        )  # fmt: skip
    config = select(p.dtype.itemsize, p.K, p.V).scan
    span = documents.source is not None
    arguments = (
        *chunks, h0, documents.cu, documents.offsets, o, final, h, delta, starts, documents.source, documents.end,
        documents.table, documents.windows, documents.states, p.T, p.chunks_per_row,
    )  # fmt: skip
    launch(
        forward_kernel, documents.count * p.HV * -(-p.V // config.BV), arguments, p.device, H=p.H, HV=p.HV, K=p.K,
        V=p.V, BK=block_width(p.K), BV=config.BV, VARLEN=documents.cu is not None, HAS_H0=h0 is not None,
        STORE_HT=store_final, STORE_H=store_h, OUTPUT=output, SPAN=span, LEG=leg, KIND=documents.kind, DOT=p.dot,
        STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip


def backward_walks(
    p: Problem, chunks: Chunks, documents: Documents, do: Tensor, dht: Tensor | None, h0: Tensor | None, dh: Tensor,
    dr: Tensor, dh0: Tensor, h: Tensor, delta: Tensor, *, store_dh0: bool, replay: bool, span: Span | None = None,
) -> None:  # fmt: skip
    """Fills dh, dR and the gradient of the initial states (`store_dh0`), and with `replay` h and delta from `h0`.

    With `span`, `documents` are its chains: h, dh and delta are by chunk of the span.
    """
    if uses_hopper(p):
        from . import hopper_walks

        return hopper_walks.backward_walks(
            p, chunks, documents, do, dht, h0, dh, dr, dh0, h, delta, store_dh0=store_dh0, replay=replay, span=span
        )
    config = select(p.dtype.itemsize, p.K, p.V).scan
    wide = p.HV * -(-p.V // config.BV)
    chains = documents.count * wide
    legs, starts, carried, carry = (documents, None, None, None) if span is None else span
    arguments = (
        do, dht, *chunks, h0, documents.cu, documents.offsets, dh, dr, dh0, h, delta, documents.end, documents.target,
        carried, carry, legs.cu, legs.offsets, legs.source, starts, documents.table, documents.windows,
        documents.adjoints, documents.states, chains, p.T, p.chunks_per_row,
    )  # fmt: skip
    launch(
        adjoint_kernel, chains + (legs.count * wide if replay else 0), arguments, p.device, H=p.H, HV=p.HV, K=p.K,
        V=p.V, BK=block_width(p.K), BV=config.BV, VARLEN=documents.cu is not None, HAS_H0=h0 is not None,
        HAS_DHT=dht is not None, STORE_DH0=store_dh0, REPLAY=replay, SPAN=span is not None,
        KIND=documents.kind, DOT=p.dot, STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip


def adjoint_summaries(p: Problem, chunks: Chunks, pieces: Documents, do: Tensor, dht: Tensor | None) -> None:
    """Fills `pieces.adjoints` of the piece before each piece, from `dht` at the end of a document, else from zero."""
    # Stands in for outputs that a summary does not have.
    none = pieces.adjoints
    backward_walks(p, chunks, pieces, do, dht, None, none, do, none, none, none, store_dh0=False, replay=False)


def piece_maps(p: Problem, chunks: Chunks, slots: int, table: Tensor, windows: Tensor, maps: Tensor) -> None:
    """Maps [slots, HV, K, K] fp32 of the pieces in the middle of a document that have no window; the rest stays as it
    is."""
    if uses_hopper(p):
        from . import hopper_walks

        return hopper_walks.piece_maps(p, chunks, slots, table, windows, maps)
    from ..kcp.map_kernel import map_kernel

    config = select(p.dtype.itemsize, p.K, p.V).scan
    BN, stages = min(config.BV, block_width(p.K)), min(config.num_stages, 2)  # with 3, one CTA an SM, not two
    arguments = (chunks.k, chunks.table, chunks.x, None, None, table, windows, maps, p.T)
    launch(
        map_kernel, slots * p.HV * -(-p.K // BN), arguments, p.device, H=p.H, HV=p.HV, K=p.K,
        BK=block_width(p.K), BN=BN, DOT=p.dot, STAGES=stages, PIECES=True, num_warps=config.num_warps,
    )  # fmt: skip
