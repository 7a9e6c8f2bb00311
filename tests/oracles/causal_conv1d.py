"""Eager chain of `causal_conv1d_fn` on [B,T,D], in any dtype, and packed documents one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ONEDNN_HAS_FP16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _conv1d(rows: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Eager's convolution, which rounds its result and its gradients once.

    Not in FP16 on a CPU without FP16 arithmetic: there ATen takes the place of oneDNN and rounds dx after every tap
    (730 of 1,584 numbers differ). The sums are taken in float64 then, and the casts round, in both directions.
    """
    if weight.dtype == torch.float16 and rows.device.type == "cpu" and not ONEDNN_HAS_FP16:
        wide = F.conv1d(
            rows.double(), weight.double(), bias if bias is None else bias.double(), 1, padding, 1, len(weight)
        )
        return wide.to(weight.dtype)
    return F.conv1d(rows, weight, bias, padding=padding, groups=len(weight))


def conv_chain(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    tokens, padding = x.shape[1], weight.shape[1] - 1
    rows = x.transpose(1, 2).to(weight.dtype)
    out = _conv1d(rows, weight.unsqueeze(1), bias, padding)[:, :, :tokens]
    if activation is not None:
        out = F.silu(out)
    return out.to(x.dtype).transpose(1, 2)


def conv_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cu_seqlens: Sequence[int] | None
) -> Tensor:
    if cu_seqlens is None:
        return conv_chain(x, weight, bias, activation)
    parts = [
        conv_chain(x[:, start:stop], weight, bias, activation)
        for start, stop in itertools.pairwise(cu_seqlens)
        if stop > start
    ]
    return torch.cat([*parts, x.new_zeros(1, x.shape[1] - cu_seqlens[-1], x.shape[2])], 1)
