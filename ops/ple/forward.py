"""CUDA forward of `ple_gate_conv`: one read of hidden, key and value for the scalars, one pass that writes out.

Nothing of size [T, N*C] is made besides `out` and copies of inputs that do not lie as dense ones do (`..layout`).
Temporaries: 8 bytes per (token, stream) beside `stats`, 4 bytes per token with documents, and the folded weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..layout import packed
from ..triton_support import on_device
from .configs import CONFIGS, fit_block, fit_warps, rows_per_span
from .kernels_forward import ple_output_kernel, ple_scalars_kernel
from .launch import BAD_CU_SEQLENS, OPTIONS, Problem


def launch_forward(
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    conv_weight: Tensor,
    cu_seqlens: Tensor | None,
    conv_mask: Tensor | None,
    dilation: int,
    eps: float,
    workspace_bytes: int,
    residual: bool,
) -> tuple[Tensor, Tensor]:
    """Returns `(out, stats)`; `workspace_bytes` cannot be exceeded, as no temporary grows with T * N * C."""
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    streams = hidden.shape[2] // value.shape[2]
    stats = torch.empty((5, *hidden.shape[:2], streams), dtype=torch.float32, device=hidden.device)
    if out.numel() == 0:
        return out, stats
    weights = [packed(w) for w in (norm_key_weight, norm_query_weight, norm_conv_weight, conv_weight)]
    with on_device(hidden.device):
        problem = Problem(hidden, key, value, conv_weight, cu_seqlens, conv_mask, dilation, None)
        problem.prepare(*weights, None)
        if problem.healthy is not None:
            torch._assert_async(problem.healthy, BAD_CU_SEQLENS)
        _scalars(problem, weights[0], weights[1], stats, eps)
        _output(problem, out, residual)
    return out, stats


def _scalars(p: Problem, key_weight: Tensor, query_weight: Tensor, stats: Tensor, eps: float) -> None:
    config = CONFIGS[p.sources["hidden"].element_size()].scalars
    block = fit_block(config.block, p.channels)
    ple_scalars_kernel[(-(-p.rows // config.rows),)](
        p.sources["hidden"], p.sources["key"], p.sources["value"], p.mask, p.fold, key_weight,
        query_weight, p.first, p.healthy, stats, p.a, p.gated, p.rows, p.tokens,
        **p.strides(hidden="hidden", key="key", value="value"), eps=eps,
        root_c=math.sqrt(p.channels), HAS_MASK=p.mask is not None, HAS_DOCUMENTS=p.cu_seqlens is not None, **p.facts,
        BT=config.rows, BC=block,
        num_warps=fit_warps(config.warps, config.rows * block), **OPTIONS,
    )  # fmt: skip


def _output(p: Problem, out: Tensor, residual: bool) -> None:
    config = CONFIGS[p.sources["value"].element_size()].output
    block = fit_block(config.block, p.channels)
    span = rows_per_span(p.rows, config.spans, p.dilation * config.unroll)
    walks = -(-p.rows // span) * p.dilation
    ple_output_kernel[(p.streams * -(-p.channels // block) * walks,)](
        p.sources["value_walk"], p.sources["hidden"], p.a, p.gated, p.first, p.fold, out, p.rows, p.tokens, span,
        **p.strides(value="value_walk", hidden="hidden"), **p.facts, D=p.dilation, RESIDUAL=residual,
        VALUE=p.value_kind, BC=block, UNROLL=config.unroll, num_warps=fit_warps(config.warps, block), **OPTIONS,
    )  # fmt: skip
