"""`causal_conv1d`: short causal depthwise convolution that restarts at document boundaries, with a backward op."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kcp.context import KcpContext
from ..kcp.fronts import HaloShard, check_context
from ..register import register_op
from ..triton_support import triton_ready
from ..validation import FLOATS, check_device, check_dtype, check_rank, check_shape, check_tensor
from ..varlen import Packing, check_packing, read_boundaries, unpack_cu_seqlens
from .reference import causal_conv1d_backward_reference, causal_conv1d_reference

ACTIVATIONS = (None, "silu")


def check_inputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
    dy: Tensor | None = None,
) -> None:
    """Everything that can be told without reading values; called by the implementations and their fakes."""
    check_rank("x", x, 3, "[B, T, D]")
    check_rank("weight", weight, 2, "[D, kernel]")
    width, kernel = x.shape[2], weight.shape[1]
    check_shape("weight", weight, (width, kernel), "[D, kernel] with x's D")
    if kernel < 1:
        raise ValueError(f"weight: expected at least one tap [D, kernel], got shape {tuple(weight.shape)}")
    # float64 is a testing aid of the CPU: all arguments, or none.
    double = x.dtype == torch.float64 and x.device.type == "cpu"
    check_dtype("x", x, (torch.float64,) if double else FLOATS)
    check_dtype("weight", weight, (torch.float64,) if double else FLOATS)
    check_device("weight", weight, x.device, "x")
    if bias is not None:
        check_shape("bias", bias, (width,), "[D]")
        check_dtype("bias", bias, (weight.dtype,))
        check_device("bias", bias, x.device, "x")
    check_packing(x.shape[0], x.device, cu_seqlens)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected None or 'silu', got {activation!r}")
    if dy is not None:
        check_shape("dy", dy, tuple(x.shape), "[B, T, D] as x")
        check_dtype("dy", dy, (x.dtype,))
        check_device("dy", dy, x.device, "x")


def _check_values(cu_seqlens: Tensor | None, tokens: int) -> None:
    """Values on the CPU; on a GPU without Triton a device-side assert, without a synchronisation."""
    if cu_seqlens is None:
        return
    if cu_seqlens.device.type == "cpu":
        read_boundaries(cu_seqlens, tokens)
        return
    good = (cu_seqlens[1:] >= cu_seqlens[:-1]).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= tokens)
    torch._assert_async(good, "cu_seqlens must start at 0, never decrease and end at most at T")


def _causal_conv1d_impl(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    check_inputs(x, weight, bias, cu_seqlens, activation)
    if triton_ready(x.device):
        from .launch import launch_forward

        return launch_forward(x, weight, bias, cu_seqlens, activation)
    _check_values(cu_seqlens, x.shape[1])
    return causal_conv1d_reference(x, weight, bias, cu_seqlens, activation)


def _causal_conv1d_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    check_inputs(x, weight, bias, cu_seqlens, activation)
    return x.new_empty(x.shape)


def _causal_conv1d_backward_impl(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_inputs(x, weight, bias, cu_seqlens, activation, dy)
    if triton_ready(x.device):
        from .launch import launch_backward

        return launch_backward(dy, x, weight, bias, cu_seqlens, activation)
    _check_values(cu_seqlens, x.shape[1])
    return causal_conv1d_backward_reference(dy, x, weight, bias, cu_seqlens, activation)


def _causal_conv1d_backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_inputs(x, weight, bias, cu_seqlens, activation, dy)
    dbias = weight.new_empty(0 if bias is None else bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


_forward_op = register_op("causal_conv1d", _causal_conv1d_impl, _causal_conv1d_fake)
register_op("causal_conv1d_backward", _causal_conv1d_backward_impl, _causal_conv1d_backward_fake)


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple, keyword_only_inputs: dict, output: Tensor
) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _autograd(ctx: torch.autograd.function.FunctionCtx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 4
    saved = ctx.saved_tensors  # once: a second read raises inside torch.utils.checkpoint
    dx, dweight, dbias = torch.ops.ple_gdn.causal_conv1d_backward(dy, *saved, **ctx.options)
    return dx, dweight, None if saved[2] is None else dbias, None


_forward_op.register_autograd(_autograd, setup_context=_setup_context)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    cp: KcpContext | None = None,
) -> Tensor:
    """Short causal depthwise convolution: `y[t] = act(bias + sum_j weight[:, j] * x[t - (kernel - 1 - j)])`.

    Follows `causal_conv1d_fn` of transformers, and is exact where it rounds: x is cast to the weight's dtype, the sum
    over taps is taken in float32 and rounded to that dtype, silu is taken in float32 and rounded again, and the result
    is cast to x's dtype. The backward rounds behind silu and behind the convolution in the same way; dweight and dbias
    are summed in float32 over all tokens and rounded once. The forward saves its inputs only. Under autocast nothing is
    cast beyond that. On CUDA each tensor is read and written once; silu uses the fast exponential there, which
    can move a value within 2^-20 of a rounding midpoint by one rounding step.

    Args:
        x: `[B, T, D]`, float32, bfloat16 or float16 (float64: CPU only, with all arguments), any strides: a transposed
            `[B, D, T]` is used in place on the CPU; CUDA copies what is not unit-stride along D.
        weight: `[D, kernel]`, kernel >= 1; its dtype may differ from x's.
        bias: `[D]` in the weight's dtype, or None.
        activation: None or "silu".
        cu_seqlens: `[documents + 1]` int32 or int64 boundaries of packed documents (B == 1), or the `Packing` of
            `prepare_varlen`. History restarts at each; rows after the last entry belong to no document: outputs and
            gradients 0. Without it each batch row is one document.
        cp: a prepared `KcpContext`: x is this rank's shard, and kernel - 1 history rows of each fragment come from
            other ranks. dweight and dbias are this rank's part of a sum over ranks. Then `cu_seqlens` must be None.

    Returns:
        `[B, T, D]`, contiguous, x's dtype. Each gradient has its input's dtype.

    Raises:
        TypeError: an argument is no plain tensor or has an unsupported dtype.
        ValueError: a shape, device, activation or `cu_seqlens` value that does not fit.
    """
    for name, tensor in {"x": x, "weight": weight}.items():
        check_tensor(name, tensor)
    if bias is not None:
        check_tensor("bias", bias)
    boundaries, _ = unpack_cu_seqlens(cu_seqlens)
    if cp is not None:
        shard = HaloShard(check_context(cp, "x", x, cu_seqlens), weight.shape[-1] - 1)
        y = causal_conv1d(shard.extend(x), weight, bias, activation=activation, cu_seqlens=shard.cu_seqlens)
        return shard.drop(y)
    return torch.ops.ple_gdn.causal_conv1d(x, weight, bias, boundaries, activation=activation)
