"""Launches of the Hopper walks: tensor maps, stages, grids. Gluon is imported only by a call that walks with it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from ..triton_launch import Box, TensorMap, launch
from . import configs
from .adjoint_hopper import hopper_adjoint_kernel
from .configs import SM_COUNT
from .forward_hopper import hopper_forward_kernel

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


def stages(chains: int) -> dict[str, int]:
    """Few chains: two stages of every tile. More chains than multiprocessors: one of those that only the output needs,
    and half the registers, so that two CTAs share a multiprocessor. The order of sums, so every bit, is the same."""
    alone = chains <= SM_COUNT
    return {"STAGES": 2, "OUTPUT_STAGES": 2 if alone else 1, "num_warps": 4, "maxnreg": 152 if alone else 128}


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
        TensorMap(table, (p.chunks * p.HV * 320,), ROW),
        TensorMap(scores, (p.chunks * p.HV * 64, 64), TILE_64) if output else None,
        TensorMap(x, (p.B * p.T, p.HV * 64), TILE_64),
        TensorMap(o, values, TILE_64) if output else None,
        TensorMap(h, states, STATE) if store_h else None,
        TensorMap(delta, (delta.numel() // values[1], values[1]), TILE_64) if store_h else None,
        h0, final, o, delta, starts, documents.source, documents.end, documents.cu, documents.offsets,
        p.T, p.chunks_per_row,
    )  # fmt: skip
    launch(
        hopper_forward_kernel, chains, arguments, p.device, H=p.H, HV=p.HV, VARLEN=documents.cu is not None,
        HAS_H0=h0 is not None, STORE_HT=store_final, STORE_H=store_h, OUTPUT=output,
        SPAN=documents.source is not None, LEG=leg, **stages(chains),
    )  # fmt: skip


def backward_walks(
    p: Problem, chunks: Chunks, documents: Documents, do: Tensor, dht: Tensor | None, h0: Tensor | None, dh: Tensor,
    dr: Tensor, dh0: Tensor, h: Tensor, delta: Tensor, *, store_dh0: bool, replay: bool, span: Span | None,
) -> None:  # fmt: skip
    """See `walks.backward_walks`; the replay is a launch of its own, beside the adjoint one of few chains."""
    few = documents.usual is not None and documents.usual * p.HV * 2 <= configs.SPANS.beside
    side = torch.cuda.Stream(p.device) if replay and few and p.device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(p.device))
    _adjoint_walk(p, chunks, documents, do, dht, dh, dr, dh0, store_dh0, span)
    if replay:
        # The adjoint walk, first in its stream, has its multiprocessors before the legs come: no other CTA fits beside
        # one of its 142 KB. They take the multiprocessors that are left, and its own when it ends.
        legs, starts = (documents, None) if span is None else span[:2]
        with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            forward_walk(
                p, chunks, legs, h0, dr, dh0, h, delta, store_final=False, store_h=True, output=False, starts=starts,
                leg=0,
            )  # fmt: skip
    if side is not None:
        torch.cuda.current_stream(p.device).wait_stream(side)


def _adjoint_walk(
    p: Problem, chunks: Chunks, documents: Documents, do: Tensor, dht: Tensor | None, dh: Tensor, dr: Tensor,
    dh0: Tensor, store_dh0: bool, span: Span | None,
) -> None:  # fmt: skip
    chains, states = documents.count * p.HV * 2, (p.chunks * p.HV * 128, 128)
    keys, values = (p.B * p.T, p.H * 128), (p.B * p.T, p.HV * 128)
    q, k, _, table, scores, x = chunks
    do, dht, q, k, x = aligned(do), aligned(dht), aligned(q), aligned(k), aligned(x)
    carried, carry = (None, None) if span is None else span[2:]
    arguments = (
        TensorMap(do, values, TILE_64),
        TensorMap(q, keys, TILE_128),
        TensorMap(k, keys, TILE_128),
        TensorMap(table, (p.chunks * p.HV * 320,), ROW),
        TensorMap(scores, (p.chunks * p.HV * 64, 64), TILE_64),
        TensorMap(x, (p.B * p.T, p.HV * 64), TILE_64),
        TensorMap(dh, states, STATE),
        TensorMap(dr, values, TILE_64),
        dht, dr, dh0, documents.end, documents.target, carried, carry, documents.cu, documents.offsets,
        p.T, p.chunks_per_row,
    )  # fmt: skip
    launch(
        hopper_adjoint_kernel, chains, arguments, p.device, H=p.H, HV=p.HV, VARLEN=documents.cu is not None,
        HAS_DHT=dht is not None, STORE_DH0=store_dh0, SPAN=span is not None,
        **stages(chains if documents.usual is None else documents.usual * p.HV * 2),
    )  # fmt: skip
