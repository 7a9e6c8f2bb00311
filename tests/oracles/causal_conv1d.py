"""Eager chain of `causal_conv1d_fn` on [B,T,D], in any dtype, and packed documents one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_chain(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    tokens, padding = x.shape[1], weight.shape[1] - 1
    rows = x.transpose(1, 2).to(weight.dtype)
    out = F.conv1d(rows, weight.unsqueeze(1), bias, padding=padding, groups=x.shape[2])[:, :, :tokens]
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
