"""Launches of the Hopper walks: tensor maps, stages, grids. Gluon is imported only by a call that walks with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .adjoint_hopper import hopper_adjoint_kernel
from .forward_hopper import hopper_forward_kernel

if TYPE_CHECKING:
    from .launch import Problem
    from .walks import Chunks, Documents

Tensor = torch.Tensor
MULTIPROCESSORS = 132
TILE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
VECTOR = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def aligned(t: Tensor | None) -> Tensor | None:
    """A tensor map starts at a multiple of 16 bytes; a view that does not is copied."""
    return t if t is None or t.data_ptr() % 16 == 0 else t.clone()


def tile_map(t: Tensor, rows: int, width: int, block_rows: int, block_width: int) -> TensorDescriptor:
    return TensorDescriptor(t, [rows, width], [width, 1], [block_rows, block_width], TILE)


def vector_map(t: Tensor) -> TensorDescriptor:
    return TensorDescriptor(t, [t.numel()], [1], [64], VECTOR)


def stages(chains: int) -> dict[str, int]:
    """Few chains: two stages of every tile. More chains than multiprocessors: one of those that only the output needs,
    and half the registers, so that two CTAs share a multiprocessor. The order of sums, so every bit, is the same."""
    alone = chains <= MULTIPROCESSORS
    return {"STAGES": 2, "OUTPUT_STAGES": 2 if alone else 1, "num_warps": 4, "maxnreg": 152 if alone else 128}


def forward_walk(
    p: Problem, chunks: Chunks, documents: Documents, h0: Tensor | None, o: Tensor, final: Tensor, h: Tensor,
    delta: Tensor, *, store_final: bool, store_h: bool, output: bool,
) -> None:  # fmt: skip
    """See `walks.forward_walk`."""
    tokens, chains = p.B * p.T, documents.count * p.HV * 2
    q, k, v, table, scores, x = chunks
    q, k, v, x, h0 = (aligned(t) for t in (q, k, v, x, h0))
    values = (tokens, p.HV * 128, 64, 64)
    hopper_forward_kernel[(chains,)](
        tile_map(q, tokens, p.H * 128, 64, 128) if output else None,
        tile_map(k, tokens, p.H * 128, 64, 128),
        tile_map(v, *values),
        vector_map(table),
        tile_map(scores, p.chunks * p.HV * 64, 64, 64, 64) if output else None,
        tile_map(x, tokens, p.HV * 64, 64, 64),
        tile_map(o, *values) if output else None,
        tile_map(h, p.chunks * p.HV * 128, 128, 128, 64) if store_h else None,
        tile_map(delta, *values) if store_h else None,
        h0, final, o, delta, documents.cu, documents.offsets, p.T, p.chunks_per_row, H=p.H, HV=p.HV,
        VARLEN=documents.cu is not None, HAS_H0=h0 is not None, STORE_HT=store_final, STORE_H=store_h, OUTPUT=output,
        **stages(chains),
    )  # fmt: skip


def backward_walks(
    p: Problem, chunks: Chunks, documents: Documents, do: Tensor, dht: Tensor | None, h0: Tensor | None, dh: Tensor,
    dr: Tensor, dh0: Tensor, h: Tensor, delta: Tensor, *, store_dh0: bool, replay: bool,
) -> None:  # fmt: skip
    """See `walks.backward_walks`; the replay is a launch of its own."""
    tokens, chains = p.B * p.T, documents.count * p.HV * 2
    q, k, _, table, scores, x = chunks
    do, dht, q, k, x = (aligned(t) for t in (do, dht, q, k, x))
    hopper_adjoint_kernel[(chains,)](
        tile_map(do, tokens, p.HV * 128, 64, 64),
        tile_map(q, tokens, p.H * 128, 64, 128),
        tile_map(k, tokens, p.H * 128, 64, 128),
        vector_map(table),
        tile_map(scores, p.chunks * p.HV * 64, 64, 64, 64),
        tile_map(x, tokens, p.HV * 64, 64, 64),
        tile_map(dh, p.chunks * p.HV * 128, 128, 128, 64),
        tile_map(dr, tokens, p.HV * 128, 64, 64),
        dht, dr, dh0, documents.cu, documents.offsets, p.T, p.chunks_per_row, H=p.H, HV=p.HV,
        VARLEN=documents.cu is not None, HAS_DHT=dht is not None, STORE_DH0=store_dh0, **stages(chains),
    )  # fmt: skip
    if replay:
        forward_walk(
            p, chunks, documents, h0, dr, dh0, h, delta, store_final=False, store_h=True, output=False
        )  # fmt: skip
