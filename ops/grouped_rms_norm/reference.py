"""The grouped zero-centred RMSNorm as the ATen calls that eager code runs: fp32 inside, one rounding at the end.

The backward spells out what autograd runs for the forward lines, in its order, so that it is bitwise equal to it.
"""

from __future__ import annotations

import torch


def grouped_rms_norm(x: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float) -> torch.Tensor:
    groups = x.float().unflatten(-1, (-1, group_size))
    normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.flatten(-2) * (1.0 + weight.float())).to(x.dtype)


def grouped_rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().unflatten(-1, (-1, group_size))
    rstd = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    dy = dy.float()
    # Summed over rows in fp32 and rounded once.
    dweight = (dy * (groups * rstd).flatten(-2)).sum_to_size(weight.shape).to(weight.dtype)
    dnormed = (dy * (1.0 + weight.float())).unflatten(-1, (-1, group_size))
    drstd = (dnormed * groups).sum(-1, keepdim=True)
    dmean = -0.5 * drstd * rstd.pow(3)
    dx = dnormed * rstd + dmean.expand(groups.shape) / group_size * (2.0 * groups)
    return dx.flatten(-2).to(x.dtype), dweight
