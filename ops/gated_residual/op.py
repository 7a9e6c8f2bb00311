"""Gated residual ops: `down`, `mix` and `inject`, each with its backward op.

Source of the math: `Qwen4ExpTextGatedResidual` and the injection in `Qwen4ExpTextDecoderLayer` of transformers.
All three are exact where eager rounds: the outputs and gradients have the bits of the eager chain they replace.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..register import register_op
from ..triton_support import triton_ready
from ..validation import FLOATS, check_device, check_dtype, check_int, check_shape, check_tensor
from . import reference


def _check_streams(streams: int) -> None:
    check_int("streams", streams)
    if streams < 2:
        raise ValueError(f"streams: expected at least 2 residual streams, got {streams}")


def _check_float(name: str, value: torch.Tensor, layout: str) -> None:
    check_dtype(name, value, FLOATS)
    if value.dim() < 1:
        raise ValueError(f"{name}: expected at least 1 dimension {layout}, got shape ()")


def _check_grad(dy: torch.Tensor, shape: tuple, dtype: torch.dtype, like: torch.Tensor, layout: str) -> None:
    check_shape("dy", dy, shape, layout)
    check_dtype("dy", dy, (dtype,))
    check_device("dy", dy, like.device, "the inputs")


def _check_down(x: torch.Tensor, streams: int, dy: torch.Tensor | None = None) -> None:
    _check_streams(streams)
    _check_float("x", x, "[.., R]")
    if dy is not None:
        _check_grad(dy, x.shape, x.dtype, x, "[.., R]")


def _check_mix(up: torch.Tensor, normed: torch.Tensor, streams: int, dy: torch.Tensor | None = None) -> tuple:
    """Checks the arguments; returns the output shape [.., C] and dtype."""
    _check_streams(streams)
    _check_float("up", up, "[.., N*C]")
    _check_float("normed", normed, "[.., N*C]")
    check_shape("normed", normed, up.shape, "[.., N*C] (that of up)")
    check_device("normed", normed, up.device, "up")
    if up.shape[-1] % streams:
        raise ValueError(f"up: expected a width divisible by streams={streams}, got {up.shape[-1]}")
    shape = (*up.shape[:-1], up.shape[-1] // streams)
    dtype = torch.promote_types(up.dtype, normed.dtype)
    if dy is not None:
        _check_grad(dy, shape, dtype, up, "[.., C]")
    return shape, dtype


def _check_inject(hidden: torch.Tensor, weights: torch.Tensor) -> tuple:
    """Checks the two factors of the injection; returns the shape of the streams [.., N*C]."""
    _check_float("hidden", hidden, "[.., C]")
    _check_float("weights", weights, "[.., N]")
    if weights.shape[-1] < 2:
        raise ValueError(f"weights: expected at least 2 residual streams [.., N], got shape {tuple(weights.shape)}")
    rows = hidden.shape[:-1]
    check_shape("weights", weights, (*rows, weights.shape[-1]), "[.., N] (rows of hidden)")
    check_device("weights", weights, hidden.device, "hidden")
    return (*rows, weights.shape[-1] * hidden.shape[-1])


def _check_inject_forward(hidden: torch.Tensor, hyper_input: torch.Tensor, weights: torch.Tensor) -> torch.dtype:
    shape = _check_inject(hidden, weights)
    check_dtype("hyper_input", hyper_input, FLOATS)
    check_shape("hyper_input", hyper_input, shape, "[.., N*C]")
    check_device("hyper_input", hyper_input, hidden.device, "hidden")
    return torch.promote_types(torch.promote_types(hidden.dtype, weights.dtype), hyper_input.dtype)


def _check_inject_backward(dy: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor) -> None:
    shape = _check_inject(hidden, weights)
    check_dtype("dy", dy, FLOATS)
    check_shape("dy", dy, shape, "[.., N*C]")
    check_device("dy", dy, hidden.device, "hidden")


def _implementation(device: torch.device) -> ModuleType:
    """The fused kernels' launchers where they run, else eager's own calls."""
    if not triton_ready(device):
        return reference
    from . import launch

    return launch


def _down(x: torch.Tensor, streams: int) -> torch.Tensor:
    _check_down(x, streams)
    return _implementation(x.device).down(x, streams).contiguous()


def _down_fake(x: torch.Tensor, streams: int) -> torch.Tensor:
    _check_down(x, streams)
    return x.new_empty(x.shape)


def _down_backward(dy: torch.Tensor, x: torch.Tensor, streams: int) -> torch.Tensor:
    _check_down(x, streams, dy)
    return _implementation(x.device).down_backward(dy, x, streams).contiguous()


def _down_backward_fake(dy: torch.Tensor, x: torch.Tensor, streams: int) -> torch.Tensor:
    _check_down(x, streams, dy)
    return x.new_empty(x.shape)


def _mix(up: torch.Tensor, normed: torch.Tensor, streams: int) -> torch.Tensor:
    _check_mix(up, normed, streams)
    return _implementation(up.device).mix(up, normed, streams).contiguous()


def _mix_fake(up: torch.Tensor, normed: torch.Tensor, streams: int) -> torch.Tensor:
    shape, dtype = _check_mix(up, normed, streams)
    return up.new_empty(shape, dtype=dtype)


def _mix_backward(
    dy: torch.Tensor, up: torch.Tensor, normed: torch.Tensor, streams: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_mix(up, normed, streams, dy)
    dup, dnormed = _implementation(up.device).mix_backward(dy, up, normed, streams)
    return dup.contiguous(), dnormed.contiguous()


def _mix_backward_fake(
    dy: torch.Tensor, up: torch.Tensor, normed: torch.Tensor, streams: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_mix(up, normed, streams, dy)
    return up.new_empty(up.shape), normed.new_empty(normed.shape)


def _inject(hidden: torch.Tensor, hyper_input: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    _check_inject_forward(hidden, hyper_input, weights)
    return _implementation(hidden.device).inject(hidden, hyper_input, weights).contiguous()


def _inject_fake(hidden: torch.Tensor, hyper_input: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    dtype = _check_inject_forward(hidden, hyper_input, weights)
    return hyper_input.new_empty(hyper_input.shape, dtype=dtype)


def _inject_backward(
    dy: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_inject_backward(dy, hidden, weights)
    dhidden, dweights = _implementation(hidden.device).inject_backward(dy, hidden, weights)
    return dhidden.contiguous(), dweights.contiguous()


def _inject_backward_fake(
    dy: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_inject_backward(dy, hidden, weights)
    return hidden.new_empty(hidden.shape), weights.new_empty(weights.shape)


down_op = register_op("gated_residual_down", _down, _down_fake)
down_backward_op = register_op("gated_residual_down_backward", _down_backward, _down_backward_fake)
mix_op = register_op("gated_residual_mix", _mix, _mix_fake)
mix_backward_op = register_op("gated_residual_mix_backward", _mix_backward, _mix_backward_fake)
inject_op = register_op("gated_residual_inject", _inject, _inject_fake)
inject_backward_op = register_op("gated_residual_inject_backward", _inject_backward, _inject_backward_fake)


def _down_setup(ctx, inputs: tuple, output: torch.Tensor) -> None:
    x, ctx.streams = inputs
    ctx.save_for_backward(x)
    ctx.set_materialize_grads(False)


def _down_grad(ctx, dy: torch.Tensor | None) -> tuple:
    if dy is None:
        return None, None
    return torch.ops.ple_gdn.gated_residual_down_backward(dy, *ctx.saved_tensors, ctx.streams), None


def _mix_setup(ctx, inputs: tuple, output: torch.Tensor) -> None:
    up, normed, ctx.streams = inputs
    ctx.save_for_backward(up, normed)
    ctx.set_materialize_grads(False)


def _mix_grad(ctx, dy: torch.Tensor | None) -> tuple:
    if dy is None:
        return None, None, None
    return *torch.ops.ple_gdn.gated_residual_mix_backward(dy, *ctx.saved_tensors, ctx.streams), None


def _inject_setup(ctx, inputs: tuple, output: torch.Tensor) -> None:
    hidden, hyper_input, weights = inputs
    ctx.hyper_dtype = hyper_input.dtype
    ctx.save_for_backward(hidden, weights)
    ctx.set_materialize_grads(False)


def _inject_grad(ctx, dy: torch.Tensor | None) -> tuple:
    if dy is None:
        return None, None, None
    dhidden = dweights = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
        dhidden, dweights = torch.ops.ple_gdn.gated_residual_inject_backward(dy, *ctx.saved_tensors)
    return dhidden, dy.to(ctx.hyper_dtype), dweights


down_op.register_autograd(_down_grad, setup_context=_down_setup)
mix_op.register_autograd(_mix_grad, setup_context=_mix_setup)
inject_op.register_autograd(_inject_grad, setup_context=_inject_setup)


def gated_residual_down(x: torch.Tensor, streams: int) -> torch.Tensor:
    """Low-rank activation of the stream gates: `silu(x / streams)`.

    Args:
        x: [.., R] fp32, bf16 or fp16.
        streams: number of residual streams N >= 2.

    Returns:
        [.., R] in x's dtype, with the bits of eager `F.silu(x / streams)`; the gradient likewise.

    Raises:
        ValueError: fewer than 2 streams, or a 0-d x.
        TypeError: x is not a plain float tensor, or streams is not an int.
    """
    check_tensor("x", x)
    check_int("streams", streams)
    return torch.ops.ple_gdn.gated_residual_down(x, streams)


def gated_residual_mix(up: torch.Tensor, normed: torch.Tensor, streams: int) -> torch.Tensor:
    """Mean over streams of `sigmoid(up) * normed`.

    Args:
        up: [.., N*C] gate logits, stream-major (stream n holds columns n*C … (n+1)*C), fp32, bf16 or fp16.
        normed: [.., N*C] normalised streams; its dtype may differ from up's.
        streams: N >= 2.

    Returns:
        [.., C] in the promoted dtype. 16-bit inputs round after the sigmoid, the product and the mean (fp32 sum in
        stream order), as eager does; gradients have their input's dtype and eager's bits.

    Raises:
        ValueError: fewer than 2 streams, a width that streams does not divide, differing shapes or devices.
        TypeError: an argument that is not a plain float tensor, or streams is not an int.
    """
    check_tensor("up", up)
    check_tensor("normed", normed)
    check_int("streams", streams)
    return torch.ops.ple_gdn.gated_residual_mix(up, normed, streams)


def gated_residual_inject(hidden: torch.Tensor, hyper_input: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Writes a block's output into every stream: `hyper_input[.., n*C + c] + weights[.., n] * hidden[.., c]`.

    Args:
        hidden: [.., C] the block's output, fp32, bf16 or fp16.
        hyper_input: [.., N*C] the residual streams, stream-major.
        weights: [.., N] one weight per token and stream, N >= 2.

    Returns:
        [.., N*C] in the promoted dtype of all three, a new tensor. 16-bit inputs round the product and the sum as
        eager does. The gradient of hyper_input is dy; those of hidden (a sum over N) and weights (over C) are summed in
        fp32 and rounded once.

    Raises:
        ValueError: fewer than 2 streams, differing rows, widths or devices.
        TypeError: an argument that is not a plain float tensor.
    """
    check_tensor("hidden", hidden)
    check_tensor("hyper_input", hyper_input)
    check_tensor("weights", weights)
    return torch.ops.ple_gdn.gated_residual_inject(hidden, hyper_input, weights)
