"""Grouped zero-centred RMSNorm: `x * rsqrt(mean(x²) + eps) * (1 + weight)` over groups of the last dimension.

Source of the math: `Qwen4ExpTextRMSNorm` (transformers 5.16 … 5.24).
"""

from __future__ import annotations

import torch

from ..register import register_op
from ..validation import FLOATS, check_device, check_dtype, check_int, check_number, check_shape, check_tensor
from . import reference


def _check(x: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float, dy: torch.Tensor | None = None) -> None:
    check_dtype("x", x, FLOATS)
    check_dtype("weight", weight, FLOATS)
    if x.dim() < 1:
        raise ValueError("x: expected at least 1 dimension [.., W], got shape ()")
    check_int("group_size", group_size)
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"group_size: expected a positive divisor of x's width {x.shape[-1]}, got {group_size}")
    if not eps > 0:
        raise ValueError(f"eps: expected a positive number, got {eps}")
    check_shape("weight", weight, (x.shape[-1],), "[W]")
    check_device("weight", weight, x.device, "x")
    if dy is not None:
        check_shape("dy", dy, x.shape, "[.., W]")
        check_dtype("dy", dy, (x.dtype,))
        check_device("dy", dy, x.device, "x")


def _norm(x: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    _check(x, weight, group_size, eps)
    return reference.grouped_rms_norm(x, weight, group_size, eps).contiguous()


def _norm_fake(x: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    _check(x, weight, group_size, eps)
    return x.new_empty(x.shape)


def _norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight, group_size, eps, dy)
    dx, dweight = reference.grouped_rms_norm_backward(dy, x, weight, group_size, eps)
    return dx.contiguous(), dweight.contiguous()


def _norm_backward_fake(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight, group_size, eps, dy)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


norm_op = register_op("grouped_rms_norm", _norm, _norm_fake)
norm_backward_op = register_op("grouped_rms_norm_backward", _norm_backward, _norm_backward_fake)


def _norm_setup(ctx, inputs: tuple, keyword_only_inputs: dict, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.keywords = dict(keyword_only_inputs)
    ctx.set_materialize_grads(False)


def _norm_grad(ctx, dy: torch.Tensor | None) -> tuple:
    if dy is None:
        return None, None
    return torch.ops.ple_gdn.grouped_rms_norm_backward(dy, *ctx.saved_tensors, **ctx.keywords)


norm_op.register_autograd(_norm_grad, setup_context=_norm_setup)


def grouped_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    """Zero-centred RMSNorm over groups of `group_size` columns.

    Args:
        x: [.., W] fp32, bf16 or fp16, W a multiple of group_size.
        weight: [W] fp32, bf16 or fp16; the scale is 1 + weight, so zeros are the neutral weight.
        group_size: columns per group, each normalised by itself.
        eps: added to the mean square.

    Returns:
        [.., W] in x's dtype, computed in fp32 and rounded once. The gradient of weight is summed over the rows in fp32
        and rounded once to weight's dtype.

    Raises:
        ValueError: group_size does not divide W, eps is not positive, weight is not [W], or the devices differ.
        TypeError: an argument of another type or dtype.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    check_int("group_size", group_size)
    check_number("eps", eps)
    return torch.ops.ple_gdn.grouped_rms_norm(x, weight, group_size=group_size, eps=eps)
