"""Launch of the Hopper gradient kernel. Gluon is imported only by a call that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..triton_launch import Box, TensorMap, launch
from .configs import SM_COUNT
from .gradients_hopper import hopper_gradient_kernel
from .hopper_walks import ROW, TILE, TILE_128, aligned

if TYPE_CHECKING:
    import torch

    from .chunk_gradients import Tapes
    from .launch import Problem
    from .walks import Documents

# 4 + 4 computing warps and the 4 that two finishing and one copying count for share 65,536 registers: 168 a thread on
# average, of which the last keep 24. With 232 for the others 3.6's assembler runs their products one by one.
REGISTERS = {"SIDE_REGISTERS": 240, "num_warps": 4, "maxnreg": 168}
STATE = Box((128, 128), TILE)


def chunk_gradients(
    p: Problem, tapes: Tapes, documents: Documents, do: torch.Tensor, dh: torch.Tensor,
    gradients: tuple[torch.Tensor, ...], scale: float, l2norm: bool,
) -> None:  # fmt: skip
    """See `chunk_gradients.chunk_gradients`. One CTA a multiprocessor, or fewer."""
    do, q, k = (aligned(t) for t in (do, tapes.q, tapes.k))
    keys, values = (p.B * p.T, p.H * 128), (p.B * p.T, p.HV * 128)
    h, delta = aligned(tapes.h), aligned(tapes.delta)  # kept, h may have fewer chunks than the bound of the launch
    arguments = (
        TensorMap(do, values, TILE_128),
        TensorMap(gradients[2], values, TILE_128),
        TensorMap(delta, (delta.numel() // values[1], values[1]), TILE_128),
        TensorMap(h, (h.numel() // 128, 128), STATE),
        TensorMap(dh, (dh.numel() // 128, 128), STATE),
        TensorMap(q, keys, TILE_128),
        TensorMap(k, keys, TILE_128),
        TensorMap(tapes.table, (tapes.table.numel(),), ROW),
        tapes.k_rstd, tapes.qscale, documents.cu, documents.offsets, *gradients,
        1.0 / scale if scale else 0.0, documents.count, p.T, p.chunks, p.chunks_per_row,
    )  # fmt: skip
    launch(
        hopper_gradient_kernel, min(p.chunks * p.H, SM_COUNT), arguments, p.device, H=p.H, HV=p.HV,
        VARLEN=documents.cu is not None, SPAN=documents.source is not None, L2NORM=l2norm, **REGISTERS,
    )  # fmt: skip
