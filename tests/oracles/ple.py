"""Eager PLE chain from its norms on, in any dtype: HF's operations on [B,T,..], and packed documents one at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TENSORS = (
    "hidden",
    "key",
    "value",
    "norm_key_weight",
    "norm_query_weight",
    "norm_conv_weight",
    "conv_weight",
)


def grouped_norm(x: Tensor, weight: Tensor, group: int, eps: float) -> Tensor:
    """`Qwen4ExpTextRMSNorm`: float32 inside (float64 stays), one rounding."""
    compute = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(compute).unflatten(-1, (-1, group))
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    return (rows.flatten(-2) * (1.0 + weight.to(compute))).type_as(x)


def ple_chain(
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    conv_weight: Tensor,
    *,
    dilation: int,
    eps: float = 1e-6,
    conv_mask: Tensor | None = None,
) -> Tensor:
    """`Qwen4ExpTextPLELayer.forward` after its projections, each batch row one document."""
    channels, tokens = value.shape[-1], value.shape[1]
    streams = hidden.shape[-1] // channels
    key_normed = grouped_norm(key, norm_key_weight, channels, eps).unflatten(-1, (streams, channels))
    query_normed = grouped_norm(hidden, norm_query_weight, channels, eps).unflatten(-1, (streams, channels))
    gate = (key_normed * query_normed).sum(dim=-1, keepdim=True) / math.sqrt(channels)
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    gated = (torch.sigmoid(gate) * value.unsqueeze(-2)).flatten(-2)
    normed = grouped_norm(gated, norm_conv_weight, channels, eps)
    if conv_mask is not None:
        gated = (gated * conv_mask[:, :, None]).to(gated.dtype)
        normed = (normed * conv_mask[:, :, None]).to(normed.dtype)
    halo = (conv_weight.shape[-1] - 1) * dilation
    padded = F.pad(normed.transpose(1, 2), (halo, 0))
    conv = F.silu(F.conv1d(padded, conv_weight, groups=conv_weight.shape[0], dilation=dilation))
    return gated + conv[..., -tokens:].transpose(1, 2)


def ple_packed(
    tensors: Sequence[Tensor],
    cu_seqlens: Sequence[int] | None,
    *,
    dilation: int,
    eps: float = 1e-6,
    conv_mask: Tensor | None = None,
) -> Tensor:
    """`ple_chain` on each document alone; zeros after the last one."""
    hidden, key, value, *weights = tensors
    if cu_seqlens is None:
        return ple_chain(*tensors, dilation=dilation, eps=eps, conv_mask=conv_mask)
    parts = []
    for start, stop in itertools.pairwise(cu_seqlens):
        if stop > start:
            rows = (x[:, start:stop] for x in (hidden, key, value))
            mask = None if conv_mask is None else conv_mask[:, start:stop]
            parts.append(ple_chain(*rows, *weights, dilation=dilation, eps=eps, conv_mask=mask))
    parts.append(hidden.new_zeros(1, hidden.shape[1] - cu_seqlens[-1], hidden.shape[2]))
    return torch.cat(parts, 1)


def ple_inputs(
    batch: int,
    tokens: int,
    streams: int,
    channels: int,
    kernel: int,
    *,
    dtypes: torch.dtype | Sequence[torch.dtype] = torch.float32,
    seed: int = 0,
    requires_grad: bool = False,
) -> list[Tensor]:
    """The seven tensors of the op, in its order."""
    generator = torch.Generator().manual_seed(seed)
    width = streams * channels
    shapes = [(batch, tokens, width)] * 2 + [(batch, tokens, channels)] + [(width,)] * 3 + [(width, 1, kernel)]
    scales = (1.0, 1.0, 1.0, 0.2, 0.2, 0.2, kernel**-0.5)
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,) * 7
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_(requires_grad)
        for shape, scale, dtype in zip(shapes, scales, dtypes, strict=True)
    ]
