"""`ple_gate_conv`: the PLE block after its projections, as one op with a backward op.

CUDA tensors take the Triton kernels of forward.py and backward.py, everything else the reference of reference.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kcp.context import KcpContext
from ..kcp.fronts import HaloShard, check_context
from ..register import register_op
from ..triton_support import triton_ready
from ..validation import (
    FLOATS,
    check_device,
    check_dtype,
    check_int,
    check_number,
    check_rank,
    check_shape,
    check_tensor,
)
from ..varlen import Packing, check_packing, read_boundaries, unpack_cu_seqlens
from .chunking import DEFAULT_WORKSPACE_BYTES, useful_dilation

MAX_KERNEL = 8
STATS = 5
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS, torch.float64)


def _check_sizes(hidden: Tensor, key: Tensor, value: Tensor, conv_weight: Tensor) -> None:
    check_rank("hidden", hidden, 3, "[B, T, N*C]")
    check_rank("value", value, 3, "[B, T, C]")
    batch, tokens, width = hidden.shape
    channels = value.shape[2]
    check_shape("value", value, (batch, tokens, channels), "[B, T, C] with hidden's B and T")
    if channels < 1 or width % channels:
        raise ValueError(f"hidden: expected a width that is a multiple of value's {channels}, got {width}")
    if width // channels < 2:
        raise ValueError(
            f"hidden: expected at least 2 streams (width {width} / value's width {channels}), got {width // channels}"
        )
    check_shape("key", key, (batch, tokens, width), "[B, T, N*C] as hidden")
    check_rank("conv_weight", conv_weight, 3, "[N*C, 1, kernel]")
    kernel = conv_weight.shape[2]
    if not 1 <= kernel <= MAX_KERNEL:
        raise ValueError(f"conv_weight: expected a kernel of 1 to {MAX_KERNEL} taps, got {kernel}")
    check_shape("conv_weight", conv_weight, (width, 1, kernel), "[N*C, 1, kernel]")


def check_inputs(
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
    workspace_bytes: int | None,
) -> None:
    """Everything that can be told without reading values; called by the implementations and their fakes."""
    _check_sizes(hidden, key, value, conv_weight)
    norms = {
        "norm_key_weight": norm_key_weight,
        "norm_query_weight": norm_query_weight,
        "norm_conv_weight": norm_conv_weight,
    }
    for name, weight in norms.items():
        check_shape(name, weight, (hidden.shape[2],), "[N*C]")
    # float64 is a testing aid of the CPU reference: all arguments, or none.
    double = hidden.dtype == torch.float64 and hidden.device.type == "cpu"
    dtypes = (torch.float64,) if double else FLOATS
    for name, tensor in {"hidden": hidden, "key": key, "value": value, **norms, "conv_weight": conv_weight}.items():
        check_dtype(name, tensor, dtypes)
        check_device(name, tensor, hidden.device, "hidden")
    check_packing(hidden.shape[0], hidden.device, cu_seqlens)
    if conv_mask is not None:
        check_shape("conv_mask", conv_mask, tuple(hidden.shape[:2]), "[B, T]")
        check_dtype("conv_mask", conv_mask, _MASKS)
        check_device("conv_mask", conv_mask, hidden.device, "hidden")
    if dilation < 1:
        raise ValueError(f"dilation: expected at least 1, got {dilation}")
    if not eps > 0:
        raise ValueError(f"eps: expected a positive number, got {eps}")
    if workspace_bytes is not None and workspace_bytes < 1:
        raise ValueError(f"workspace_bytes: expected None or a positive number of bytes, got {workspace_bytes}")


def _check_backward(dout: Tensor, hidden: Tensor, value: Tensor, stats: Tensor, chunk_rows: int | None) -> None:
    check_shape("dout", dout, tuple(hidden.shape), "[B, T, N*C] as hidden")
    check_dtype("dout", dout, (hidden.dtype,))
    check_device("dout", dout, hidden.device, "hidden")
    batch, tokens, width = hidden.shape
    check_shape("stats", stats, (STATS, batch, tokens, width // value.shape[2]), "[5, B, T, N]")
    check_dtype("stats", stats, (_stats_dtype(hidden),))
    check_device("stats", stats, hidden.device, "hidden")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected None or at least 1, got {chunk_rows}")


def _stats_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _reference_packing(cu_seqlens: Tensor | None, hidden: Tensor) -> tuple[Tensor | None, int]:
    """`cu_seqlens` as the reference reads it, and the number of rows that belong to a document."""
    if cu_seqlens is None:
        return None, hidden.shape[1]
    live = read_boundaries(cu_seqlens, hidden.shape[1])[-1]
    return cu_seqlens.to(hidden.device, torch.int64).contiguous(), live


def _ple_gate_conv_impl(
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    conv_weight: Tensor,
    cu_seqlens: Tensor | None = None,
    conv_mask: Tensor | None = None,
    *,
    dilation: int,
    eps: float = 1e-6,
    workspace_bytes: int | None = None,
    residual: bool = False,
) -> tuple[Tensor, Tensor]:
    tensors = (hidden, key, value, norm_key_weight, norm_query_weight, norm_conv_weight, conv_weight)
    check_inputs(*tensors, cu_seqlens, conv_mask, dilation, eps, workspace_bytes)
    budget = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    dilation = useful_dilation(dilation, hidden.shape[1])
    if triton_ready(hidden.device):
        from .forward import launch_forward

        return launch_forward(*tensors, cu_seqlens, conv_mask, dilation, eps, budget, residual)
    from .reference import ple_gate_conv_reference

    packing = _reference_packing(cu_seqlens, hidden)
    return ple_gate_conv_reference(*tensors, *packing, conv_mask, dilation, eps, budget, residual)


def _ple_gate_conv_fake(
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    conv_weight: Tensor,
    cu_seqlens: Tensor | None = None,
    conv_mask: Tensor | None = None,
    *,
    dilation: int,
    eps: float = 1e-6,
    workspace_bytes: int | None = None,
    residual: bool = False,
) -> tuple[Tensor, Tensor]:
    tensors = (hidden, key, value, norm_key_weight, norm_query_weight, norm_conv_weight, conv_weight)
    check_inputs(*tensors, cu_seqlens, conv_mask, dilation, eps, workspace_bytes)
    batch, tokens, width = hidden.shape
    stats = hidden.new_empty((STATS, batch, tokens, width // value.shape[2]), dtype=_stats_dtype(hidden))
    return hidden.new_empty(hidden.shape), stats


def _ple_gate_conv_backward_impl(
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
    *,
    dilation: int,
    eps: float = 1e-6,
    workspace_bytes: int | None = None,
    chunk_rows: int | None = None,
    residual: bool = False,
) -> tuple[Tensor, ...]:
    tensors = (hidden, key, value, norm_key_weight, norm_query_weight, norm_conv_weight, conv_weight)
    check_inputs(*tensors, cu_seqlens, conv_mask, dilation, eps, workspace_bytes)
    _check_backward(dout, hidden, value, stats, chunk_rows)
    budget = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    dilation = useful_dilation(dilation, hidden.shape[1])
    if triton_ready(hidden.device):
        from .backward import launch_backward

        return launch_backward(
            dout, *tensors, cu_seqlens, conv_mask, stats, dilation, eps, budget, chunk_rows, residual
        )
    from .reference_backward import ple_gate_conv_backward_reference

    packing = _reference_packing(cu_seqlens, hidden)
    return ple_gate_conv_backward_reference(
        dout, *tensors, *packing, conv_mask, stats, dilation, eps, budget, chunk_rows, residual
    )


def _ple_gate_conv_backward_fake(
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
    *,
    dilation: int,
    eps: float = 1e-6,
    workspace_bytes: int | None = None,
    chunk_rows: int | None = None,
    residual: bool = False,
) -> tuple[Tensor, ...]:
    tensors = (hidden, key, value, norm_key_weight, norm_query_weight, norm_conv_weight, conv_weight)
    check_inputs(*tensors, cu_seqlens, conv_mask, dilation, eps, workspace_bytes)
    _check_backward(dout, hidden, value, stats, chunk_rows)
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)


_forward_op = register_op("ple_gate_conv", _ple_gate_conv_impl, _ple_gate_conv_fake)
register_op("ple_gate_conv_backward", _ple_gate_conv_backward_impl, _ple_gate_conv_backward_fake)


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple, keyword_only_inputs: dict, output: tuple[Tensor, Tensor]
) -> None:
    stats = output[1]
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, stats)
    ctx.options = keyword_only_inputs


def _autograd(
    ctx: torch.autograd.function.FunctionCtx, dout: Tensor | None, dstats: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 9
    grads = torch.ops.ple_gdn.ple_gate_conv_backward(dout, *ctx.saved_tensors, **ctx.options)
    return *grads, None, None


_forward_op.register_autograd(_autograd, setup_context=_setup_context)


def ple_gate_conv(
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
    cu_seqlens: Tensor | Packing | None = None,
    conv_mask: Tensor | None = None,
    workspace_bytes: int | None = None,
    cp: KcpContext | None = None,
) -> Tensor:
    """Per-layer embedding block after its projections: gate, grouped norm, dilated causal convolution.

    Per token and stream n, with the zero-centred grouped norm `rmsnorm(x; w) = x * rsqrt(mean(x^2) + eps) * (1 + w)`:

        score = <rmsnorm(key)_n, rmsnorm(hidden)_n> / sqrt(C)
        gate  = sigmoid(sign(score) * sqrt(max(|score|, 1e-6)))          sign(0) = 0
        gated = gate * value                                            [N*C], stream-major
        out   = mask * gated + silu(conv(mask * rmsnorm(gated)))

    as `Qwen4ExpTextPLELayer.forward` of transformers does from its `norm_key` on. Math runs in float32 whatever the
    inputs; the output and the token gradients are rounded once, weight gradients are summed in float32 over all
    tokens and rounded once. The gradient of the clamped root is eager's: zero where |score| < 1e-6. Under autocast
    nothing is cast: each argument is used in the dtype it arrives in.

    Args:
        hidden: `[B, T, N*C]`, the residual streams (the query); N >= 2 streams.
        key: `[B, T, N*C]`.
        value: `[B, T, C]`, shared by the streams.
        norm_key_weight, norm_query_weight, norm_conv_weight: `[N*C]`, zero-centred.
        conv_weight: `[N*C, 1, kernel]` as in `nn.Conv1d`, kernel 1 to 8.
        dilation: of the convolution, in tokens, at least 1.
        eps: of the three norms.
        cu_seqlens: `[documents + 1]` int32 or int64 boundaries of packed documents (B == 1), or the `Packing` of
            `prepare_varlen`. Documents never read each other's rows; rows after the last entry belong to no document:
            outputs and gradients 0. Without it each batch row is one document.
        conv_mask: `[B, T]` bool, integer or float, multiplied as above (eager's padding mask); no gradient.
        workspace_bytes: bound on temporaries of forward and of backward, beside 4-byte scalars per token and stream;
            default 64 MiB, at least one token row and its convolution halo. Outputs and token gradients do not depend
            on it bitwise, weight gradients up to float32 summation order. On CUDA an argument or gradient is copied
            first where its rows are not unit-stride or not aligned as dense rows are: strides change no bit.
        cp: a prepared `KcpContext`: hidden, key, value and conv_mask are this rank's shard, and only the convolution's
            history rows, (kernel - 1) * dilation of each fragment, come from other ranks. Weight gradients are this
            rank's part of a sum over ranks. Then `cu_seqlens` must be None.

    The seven floating arguments may each be float32, bfloat16 or float16 (all float64: CPU only), with any strides.

    Returns:
        `[B, T, N*C]`, contiguous, hidden's dtype. Each gradient has its input's dtype.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        ValueError: a shape, device, `dilation`, `eps`, `workspace_bytes` or `cu_seqlens` value that does not fit.
    """
    tensors = {
        "hidden": hidden,
        "key": key,
        "value": value,
        "norm_key_weight": norm_key_weight,
        "norm_query_weight": norm_query_weight,
        "norm_conv_weight": norm_conv_weight,
        "conv_weight": conv_weight,
    }
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    if conv_mask is not None:
        check_tensor("conv_mask", conv_mask)
    check_int("dilation", dilation)
    check_number("eps", eps)
    if workspace_bytes is not None:
        check_int("workspace_bytes", workspace_bytes)
    boundaries, _ = unpack_cu_seqlens(cu_seqlens)
    if cp is not None:
        cp = check_context(cp, "hidden", hidden, cu_seqlens)
        shard = HaloShard(cp, (conv_weight.shape[-1] - 1) * dilation)
        hidden, key, value = (shard.extend(x) for x in (hidden, key, value))
        if conv_mask is not None:
            conv_mask = shard.extend(conv_mask.unsqueeze(-1)).squeeze(-1)
        out = ple_gate_conv(
            *(hidden, key, value, norm_key_weight, norm_query_weight, norm_conv_weight, conv_weight),
            dilation=dilation,
            eps=eps,
            cu_seqlens=shard.cu_seqlens,
            conv_mask=conv_mask,
            workspace_bytes=workspace_bytes,
        )
        return shard.drop(out)
    out, _ = torch.ops.ple_gdn.ple_gate_conv(
        *tensors.values(), boundaries, conv_mask, dilation=dilation, eps=eps, workspace_bytes=workspace_bytes
    )
    return out
