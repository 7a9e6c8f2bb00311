"""The eager chains that the gated residual ops replace, and a bitwise comparison."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def down(x: torch.Tensor, streams: int) -> torch.Tensor:
    return F.silu(x / streams)


def mix(up: torch.Tensor, normed: torch.Tensor, streams: int) -> torch.Tensor:
    width = up.shape[-1] // streams
    gate = torch.sigmoid(up).unflatten(-1, (streams, width))
    return (gate * normed.unflatten(-1, (streams, width))).mean(dim=-2)


def inject(hidden: torch.Tensor, hyper_input: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    injection = hidden.unsqueeze(-2) * weights.unsqueeze(-1)
    return hyper_input + injection.flatten(-2)


def grouped_rms_norm(x: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    groups = x.float().unflatten(-1, (x.shape[-1] // group_size, group_size))
    normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.flatten(-2) * (1.0 + weight.float())).type_as(x)


def mismatches(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements whose bits differ; any NaN equals any NaN, -0.0 differs from 0.0. Shapes and dtypes must agree."""
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    differ = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    return int((differ & ~(actual.isnan() & expected.isnan())).sum())


def all_codes(dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit pattern as a value of dtype, NaNs and infinities included."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
