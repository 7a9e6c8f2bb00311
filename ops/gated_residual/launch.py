"""Launchers of the Triton kernels: layout, grids, output tensors. Imported on the first CUDA call only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import packed
from ..triton_support import on_device
from . import kernels

# 8 elements of 16 bits a thread: one 16-byte load.
BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _grid(y: torch.Tensor, streams: int, width: int) -> tuple[int, int]:
    return y.numel() // (streams * width), triton.cdiv(width, BLOCK)


def down(x: torch.Tensor, streams: int) -> torch.Tensor:
    x, y = x.contiguous(), x.new_empty(x.shape)
    if y.numel():
        with on_device(x.device):
            grid = (triton.cdiv(y.numel(), BLOCK),)
            kernels.down_kernel[grid](x, y, y.numel(), 1.0 / streams, BLOCK=BLOCK, **OPTIONS)
    return y


def down_backward(dy: torch.Tensor, x: torch.Tensor, streams: int) -> torch.Tensor:
    dy, x, dx = dy.contiguous(), x.contiguous(), x.new_empty(x.shape)
    if dx.numel():
        with on_device(x.device):
            grid = (triton.cdiv(dx.numel(), BLOCK),)
            kernels.down_backward_kernel[grid](dy, x, dx, dx.numel(), 1.0 / streams, BLOCK=BLOCK, **OPTIONS)
    return dx


def mix(up: torch.Tensor, normed: torch.Tensor, streams: int) -> torch.Tensor:
    up, normed, width = up.contiguous(), normed.contiguous(), up.shape[-1] // streams
    y = up.new_empty((*up.shape[:-1], width), dtype=torch.promote_types(up.dtype, normed.dtype))
    if y.numel():
        with on_device(up.device):
            grid = _grid(up, streams, width)
            kernels.mix_kernel[grid](up, normed, y, width, 1.0 / streams, N=streams, BLOCK=BLOCK, **OPTIONS)
    return y


def mix_backward(
    dy: torch.Tensor, up: torch.Tensor, normed: torch.Tensor, streams: int
) -> tuple[torch.Tensor, torch.Tensor]:
    dy, up, normed, width = dy.contiguous(), up.contiguous(), normed.contiguous(), up.shape[-1] // streams
    dup, dnormed = up.new_empty(up.shape), normed.new_empty(normed.shape)
    if dup.numel():
        with on_device(up.device):
            kernels.mix_backward_kernel[_grid(up, streams, width)](
                dy, up, normed, dup, dnormed, width, 1.0 / streams, N=streams, BLOCK=BLOCK, **OPTIONS
            )
    return dup, dnormed


def inject(hidden: torch.Tensor, hyper_input: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    hidden, hyper_input, weights = hidden.contiguous(), hyper_input.contiguous(), weights.contiguous()
    streams, width = weights.shape[-1], hidden.shape[-1]
    product = torch.promote_types(hidden.dtype, weights.dtype)
    y = hyper_input.new_empty(hyper_input.shape, dtype=torch.promote_types(product, hyper_input.dtype))
    if y.numel():
        with on_device(hidden.device):
            kernels.inject_kernel[_grid(y, streams, width)](
                hidden,
                hyper_input,
                weights,
                y,
                width,
                N=streams,
                PRODUCT=TRITON_DTYPES[product],
                BLOCK=BLOCK,
                **OPTIONS,
            )
    return y


def inject_backward(dy: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dy, hidden, weights = packed(dy), packed(hidden), packed(weights)  # the only kernel that sums over a tile
    streams, width = weights.shape[-1], hidden.shape[-1]
    dhidden, dweights = hidden.new_empty(hidden.shape), weights.new_zeros(weights.shape)
    if dhidden.numel():
        product = TRITON_DTYPES[torch.promote_types(hidden.dtype, weights.dtype)]
        with on_device(hidden.device):
            kernels.inject_backward_kernel[(weights.numel() // streams,)](
                dy, hidden, weights, dhidden, dweights, width, N=streams, PRODUCT=product, BLOCK=BLOCK, **OPTIONS
            )
    return dhidden, dweights
