"""Launch of the Hopper operand kernel and of the one that rounds X of some chunks anew.

Gluon is imported only by a call that takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..triton_launch import launch
from .operands_hopper import hopper_operands_kernel
from .rounding_hopper import MARKS, hopper_rounding_kernel

if TYPE_CHECKING:
    from .launch import Problem

Tensor = torch.Tensor
# One CTA of 4 warps inverts four value heads of a q/k head. Four share a multiprocessor: 36,352 bytes, 128 registers.
HEADS = 4


def launch_operands(
    p: Problem, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, cu: Tensor | None, offsets: Tensor | None,
    tapes: tuple[Tensor, ...], table: Tensor, scores: Tensor, scale: float, l2norm: bool, inverse: bool,
) -> None:  # fmt: skip
    """See `launch.make_operands`. Rows are copied in pieces of 16 bytes, so q and k are `packed`."""
    parts = -(-p.HV // p.H // HEADS)
    arguments = (
        q, k, g if inverse else None, beta, cu, offsets, *tapes[:3], tapes[3] if inverse else None, table, scores,
        scale, p.documents, p.T, p.chunks_per_row,
    )  # fmt: skip
    launch(
        hopper_operands_kernel, p.chunks * p.H * parts, arguments, p.device, H=p.H, HV=p.HV, VARLEN=p.varlen,
        L2NORM=l2norm and inverse, INVERSE=inverse, num_warps=4, maxnreg=128,
    )  # fmt: skip
    if inverse:
        arguments = (
            k, beta, tapes[0], tapes[1], table, tapes[3], cu, offsets, p.documents, p.T, p.chunks_per_row, p.chunks,
        )  # fmt: skip
        launch(
            hopper_rounding_kernel, -(-p.chunks * p.H // MARKS), arguments, p.device, H=p.H, HV=p.HV,
            VARLEN=p.varlen, ITEMS=MARKS, num_warps=4,
        )  # fmt: skip
