"""Launch of the chunk-parallel gradients: one interface over the plain kernel and the Hopper one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..triton_launch import launch
from . import walks
from .configs import block_width, select
from .gradients import gradient_kernel

if TYPE_CHECKING:
    from .launch import Problem
    from .walks import Documents

Tensor = torch.Tensor


class Tapes(NamedTuple):
    """What the gradients of a chunk read besides dO and dh: inputs, row table, row factors, states and delta."""

    q: Tensor
    k: Tensor
    g: Tensor
    table: Tensor
    k_rstd: Tensor
    qscale: Tensor
    h: Tensor
    delta: Tensor


def chunk_gradients(
    p: Problem, tapes: Tapes, documents: Documents, do: Tensor, dh: Tensor, gradients: tuple[Tensor, ...],
    scale: float, l2norm: bool,
) -> None:  # fmt: skip
    """Fills `gradients` (dq, dk, dv, dg, dbeta); dv holds dR on entry. Documents that are parts of a span: its chunks
    alone."""
    if walks.uses_hopper(p):
        from . import hopper_gradients

        return hopper_gradients.chunk_gradients(p, tapes, documents, do, dh, gradients, scale, l2norm)
    config = select(p.dtype.itemsize, p.K, p.V).gradient
    arguments = (
        do, *tapes, dh, documents.cu, documents.offsets, *gradients,
        scale, 1.0 / scale if scale else 0.0, documents.count, p.T, p.chunks_per_row,
    )  # fmt: skip
    launch(
        gradient_kernel, p.chunks * p.H, arguments, p.device, H=p.H, HV=p.HV, K=p.K, V=p.V, BK=block_width(p.K),
        BV=config.BV, VARLEN=p.varlen, SPAN=documents.source is not None, L2NORM=l2norm, DOT=p.dot,
        STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
