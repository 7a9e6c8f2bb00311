"""CUDA backward of `ple_gate_conv` from the inputs and the [5, T, N] scalars of the forward; see PLE kernels.

Passes: conv (dout, value -> row sums and conv weight partials), scalars, value gradient (dout, value), score gradients
(hidden, key), weight gradients. Weight gradients are partial sums per span of rows, summed in index order: no atomics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..layout import packed
from ..triton_support import on_device
from .configs import CONFIGS, Config, fit_block, fit_warps, rows_per_span
from .kernels_backward import ple_conv_backward_kernel, ple_score_backward_kernel
from .kernels_tokens import ple_token_gradients_kernel, ple_weight_gradient_kernel
from .launch import OPTIONS, Problem

SCORE_ROWS = 32
# Channels per block of the final sum of partials.
PARTIAL_CHANNELS = 32


def launch_backward(
    dout: Tensor,
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    conv_weight: Tensor,
    cu_seqlens: Tensor | None,
    conv_mask: Tensor | None,
    stats: Tensor,
    dilation: int,
    eps: float,
    workspace_bytes: int,
    chunk_rows: int | None,
    residual: bool,
) -> tuple[Tensor, ...]:
    """The seven gradients in the order of the inputs.

    `workspace_bytes` bounds the weight partials (at least one span per pass); `chunk_rows` bounds buffers of whole rows
    in the reference and has nothing to bound here, where a program keeps its rows in registers.
    """
    inputs = (hidden, key, value, norm_key_weight, norm_query_weight, norm_conv_weight, conv_weight)
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    if hidden.numel() == 0:
        return tuple(grad.zero_() for grad in grads)
    weights = [packed(w) for w in inputs[3:]]
    with on_device(hidden.device):
        problem = Problem(hidden, key, value, conv_weight, cu_seqlens, conv_mask, dilation, dout)
        stats = packed(stats)
        problem.prepare(*weights, stats)
        spans = plan_spans(problem.rows, problem.width, problem.kernel, dilation, _config(problem), workspace_bytes)
        sums, dtaps = _conv_backward(problem, spans[0])
        _score_backward(problem, sums, stats, eps)
        dscores = _token_gradients(problem, sums, grads[:3], spans[1], residual)
        _weight_gradients(problem, dtaps, dscores, weights, grads[3:])
    return grads


def _config(p: Problem) -> Config:
    return CONFIGS[p.sources["hidden"].element_size()]


def plan_spans(
    rows: int, width: int, kernel: int, dilation: int, config: Config, workspace_bytes: int
) -> tuple[int, int]:
    """Rows per span of the two passes that accumulate weight gradients, as many spans as the budget holds.

    A conv span costs `dilation` partial rows of kernel * N*C floats, a score span one row of N*C; the folded weights
    take kernel + 1 rows.
    """
    row_bytes = 4 * width
    left = workspace_bytes // row_bytes - (kernel + 1)
    score_spans = max(1, min(config.score.spans, left // 4))
    conv_spans = max(1, min(config.conv.spans, (left - score_spans) // (dilation * kernel)))
    return (
        rows_per_span(rows, conv_spans, dilation * config.conv.unroll),
        -(-rows // (score_spans * config.score.rows)) * config.score.rows,
    )


def _conv_backward(p: Problem, span: int) -> tuple[Tensor, Tensor]:
    config = _config(p).conv
    block = fit_block(config.block, p.channels)
    tiles = -(-p.channels // block)
    walks = -(-p.rows // span) * p.dilation
    # The score pass keeps four planes of its own in it.
    sums = p.scratch(max(2 * tiles, 4), p.rows, p.streams)
    dtaps = p.scratch(walks, p.kernel, p.width)
    ple_conv_backward_kernel[(p.streams * tiles * walks,)](
        p.sources["dout_walk"], p.sources["value_walk"], p.a, p.first, p.fold, sums, dtaps, p.rows, p.tokens, span,
        **p.strides(dout="dout_walk", value="value_walk"), **p.facts, D=p.dilation, VALUE=p.value_kind,
        DOUT=p.dout_kind, BC=block, UNROLL=config.unroll, num_warps=fit_warps(config.warps, block), **OPTIONS,
    )  # fmt: skip
    return sums, dtaps


def _score_backward(p: Problem, sums: Tensor, stats: Tensor, eps: float) -> None:
    config = _config(p).conv
    tiles = -(-p.channels // fit_block(config.block, p.channels))
    padded = 1 << (p.streams - 1).bit_length()
    ple_score_backward_kernel[(-(-p.rows // SCORE_ROWS),)](
        sums, stats, p.gated, p.first, p.rows, p.tokens, eps, math.sqrt(p.channels), C=p.channels, N=p.streams,
        NP=padded, TILES=tiles, HAS_FIRST=p.first is not None, BT=SCORE_ROWS, num_warps=4, **OPTIONS,
    )  # fmt: skip


def _token_gradients(p: Problem, sums: Tensor, grads: tuple[Tensor, ...], score_span: int, residual: bool) -> Tensor:
    value, score = _config(p).value, _config(p).score
    # Registers hold every stream's taps of a channel: fewer channels per thread with more streams.
    value_block = fit_block(max(value.block * 4 // (1 << (p.streams - 1).bit_length()), 32), p.channels)
    value_span = rows_per_span(p.rows, value.spans, p.dilation)
    value_programs = -(-p.channels // value_block) * -(-p.rows // value_span) * p.dilation
    score_block = fit_block(score.block, p.channels)
    score_spans = -(-p.rows // score_span)
    score_programs = -(-p.channels // score_block) * p.streams * score_spans
    dscores = p.scratch(score_spans, p.width)
    x = p.sources
    dhidden, dkey, dvalue = grads
    ple_token_gradients_kernel[(2 * max(value_programs, score_programs),)](
        x["dout"], x["dout_walk"], x["hidden_walk"], x["key_walk"], x["value_walk"], p.a, p.gated, sums, sums[3],
        p.first, p.fold, dhidden, dkey, dvalue, dscores, p.rows, p.tokens, value_span, score_span, value_programs,
        score_programs,
        **p.strides(
            dout="dout", dout_walk="dout_walk", hidden="hidden_walk", key="key_walk", value="value_walk"
        ),
        **p.facts, D=p.dilation, RESIDUAL=residual, HIDDEN=p.hidden_kind, KEY=p.key_kind, VALUE=p.value_kind,
        DOUT=p.dout_kind, VALUE_BC=value_block, SCORE_BT=score.rows, SCORE_BC=score_block, num_warps=1,
        maxnreg=_config(p).token_registers[p.first is not None or residual], **OPTIONS,
    )  # fmt: skip
    return dscores


def _weight_gradients(
    p: Problem, dtaps: Tensor, dscores: Tensor, weights: list[Tensor], grads: tuple[Tensor, ...]
) -> None:
    # Registers hold a tile of each tap twice.
    rows = 64 if p.kernel <= 4 else 32
    ple_weight_gradient_kernel[(-(-p.width // PARTIAL_CHANNELS),)](
        dtaps, dscores, *weights, *grads, dtaps.shape[0], dscores.shape[0], W=p.width, K=p.kernel, BP=rows,
        BW=PARTIAL_CHANNELS, num_warps=4, **OPTIONS,
    )  # fmt: skip
