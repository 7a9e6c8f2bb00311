"""Launches of the Hopper walks: tensor maps, stages, grids. Gluon is imported only by a call that walks with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from ..triton_launch import Box, TensorMap, launch
from . import configs
from .adjoint_hopper import hopper_adjoint_kernel
from .configs import SM_COUNT
from .forward_hopper import hopper_forward_kernel
from .map_hopper import hopper_map_kernel
from .walks import SUMMARIES

if TYPE_CHECKING:
    from .launch import Problem
    from .walks import Chunks, Documents, Span

Tensor = torch.Tensor
TILE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
TILE_64 = Box((64, 64), TILE)
TILE_128 = Box((64, 128), TILE)
STATE = Box((128, 64), TILE)
ROW = Box((64,), NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))


def aligned(t: Tensor | None) -> Tensor | None:
    """A tensor map starts at a multiple of 16 bytes; a view that does not is copied."""
    return t if t is None or t.data_ptr() % 16 == 0 else t.clone()


def stages(shared: bool) -> dict[str, int]:
    """Three stages of every tile; or two, one of those that only the output needs and half the registers, so that two
    CTAs share a multiprocessor. The order of sums, so every bit, is the same.

    Sharing pays for a replay of more chains than multiprocessors (.60 shared, .73 ms alone, at 8x4096, 48 heads),
    but not for a forward (.60 and .54) or an adjoint walk (.84 and .67): those are bound by L2.
    """
    if shared:
        return {"STAGES": 2, "OUTPUT_STAGES": 1, "num_warps": 4, "maxnreg": 128}
    return {"STAGES": 3, "OUTPUT_STAGES": 3, "num_warps": 4, "maxnreg": 152}


def forward_walk(
    p: Problem, chunks: Chunks, documents: Documents, h0: Tensor | None, o: Tensor, final: Tensor, h: Tensor,
    delta: Tensor, *, store_final: bool, store_h: bool, output: bool, starts: Tensor | None, leg: int,
) -> None:  # fmt: skip
    """See `walks.forward_walk`."""
    chains, states = documents.count * p.HV * 2, (p.chunks * p.HV * 128, 128)
    keys, values = (p.B * p.T, p.H * 128), (p.B * p.T, p.HV * 128)
    q, k, v, table, scores, x = chunks
    q, k, v, x, h0 = aligned(q), aligned(k), aligned(v), aligned(x), aligned(h0)
    arguments = (
        TensorMap(q, keys, TILE_128) if output else None,
        TensorMap(k, keys, TILE_128),
        TensorMap(v, values, TILE_64),
        TensorMap(table, (table.numel(),), ROW),
        TensorMap(scores, (scores.numel() // 64, 64), TILE_64) if output else None,
        TensorMap(x, (p.B * p.T, p.HV * 64), TILE_64),
        TensorMap(o, values, TILE_64) if output else None,
        TensorMap(h, states, STATE) if store_h else None,
        TensorMap(delta, (delta.numel() // values[1], values[1]), TILE_64) if store_h else None,
        h0, final, o, delta, starts, documents.source, documents.end, documents.cu, documents.offsets,
        documents.table, documents.windows, documents.states, p.T, p.chunks_per_row,
    )  # fmt: skip
    launch(
        hopper_forward_kernel, chains, arguments, p.device, H=p.H, HV=p.HV, VARLEN=documents.cu is not None,
        HAS_H0=h0 is not None, STORE_HT=store_final, STORE_H=store_h, OUTPUT=output,
        SPAN=documents.source is not None, LEG=leg, KIND=documents.kind,
        **stages(not output and chains > SM_COUNT),
    )  # fmt: skip


def backward_walks(
    p: Problem, chunks: Chunks, documents: Documents, do: Tensor, dht: Tensor | None, h0: Tensor | None, dh: Tensor,
    dr: Tensor, dh0: Tensor, h: Tensor, delta: Tensor, *, store_dh0: bool, replay: bool, span: Span | None,
) -> None:  # fmt: skip
    """See `walks.backward_walks`; the replay is a launch of its own."""
    _adjoint_walk(p, chunks, documents, do, dht, dh, dr, dh0, store_dh0, span)
    if replay:
        legs, starts = (documents, None) if span is None else span[:2]
        forward_walk(
            p, chunks, legs, h0, dr, dh0, h, delta, store_final=False, store_h=True, output=False, starts=starts, leg=0
        )


def _adjoint_walk(
    p: Problem, chunks: Chunks, documents: Documents, do: Tensor, dht: Tensor | None, dh: Tensor, dr: Tensor,
    dh0: Tensor, store_dh0: bool, span: Span | None,
) -> None:  # fmt: skip
    chains, states = documents.count * p.HV * 2, (p.chunks * p.HV * 128, 128)
    keys, values = (p.B * p.T, p.H * 128), (p.B * p.T, p.HV * 128)
    q, k, _, table, scores, x = chunks
    do, dht, q, k, x = aligned(do), aligned(dht), aligned(q), aligned(k), aligned(x)
    carried, carry = (None, None) if span is None else span[2:]
    stored = documents.kind != SUMMARIES
    arguments = (
        TensorMap(do, values, TILE_64),
        TensorMap(q, keys, TILE_128),
        TensorMap(k, keys, TILE_128),
        TensorMap(table, (table.numel(),), ROW),
        TensorMap(scores, (scores.numel() // 64, 64), TILE_64),
        TensorMap(x, (p.B * p.T, p.HV * 64), TILE_64),
        TensorMap(dh, states, STATE) if stored else None,
        TensorMap(dr, values, TILE_64) if stored else None,
        dht, dr, dh0, documents.end, documents.target, carried, carry, documents.cu, documents.offsets,
        documents.table, documents.windows, documents.adjoints, p.T, p.chunks_per_row,
    )  # fmt: skip
    launch(
        hopper_adjoint_kernel, chains, arguments, p.device, H=p.H, HV=p.HV, VARLEN=documents.cu is not None,
        HAS_DHT=dht is not None, STORE_DH0=store_dh0, SPAN=span is not None, KIND=documents.kind,
        **stages(shared=False),
    )  # fmt: skip


def piece_maps(p: Problem, chunks: Chunks, slots: int, table: Tensor, windows: Tensor, maps: Tensor) -> None:
    """See `walks.piece_maps`. Two CTAs a multiprocessor."""
    arguments = (
        TensorMap(aligned(chunks.k), (p.B * p.T, p.H * 128), TILE_128),
        TensorMap(chunks.table, (p.chunks * p.HV * 320,), ROW),
        TensorMap(aligned(chunks.x), (p.B * p.T, p.HV * 64), TILE_64),
        table, windows, maps,
    )  # fmt: skip
    launch(
        hopper_map_kernel, slots * p.HV * 2, arguments, p.device, H=p.H, HV=p.HV, STAGES=3, TERMS=configs.MAP_TERMS,
        num_warps=4, maxnreg=128,
    )  # fmt: skip
