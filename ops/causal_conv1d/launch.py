"""Launchers of the Triton kernels: layout, spans, output tensors. Imported on the first CUDA call only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..triton_support import on_device
from ..varlen import read_boundaries
from .kernels import BATCH_ROWS, ONE_DOCUMENT, PACKED, check_kernel, forward_kernel
from .kernels_backward import backward_kernel, weight_kernel

# Without contraction: every fused multiply-add is written out, so unrolled copies of a row round alike.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
BAD_CU_SEQLENS = "cu_seqlens must start at 0, never decrease and end at or before T"
# Spans and channels per tile of the final sum.
PARTIAL_BLOCK = (16, 64)
MINIMUM_SPAN = 64


class Walk(NamedTuple):
    """Programs of `channels` (at 4 taps) and `warps`, `rows` at a time; `programs` of them at most."""

    channels: int
    rows: int
    programs: int
    warps: int = 1


# By bytes per element. 64 and 128 registers a thread at most (fp32: 96 and 160): 32 and 16 (20 and 12) warps on each of
# 132 multiprocessors, equally many on its quarters; one wave. Fixed: the bits of dweight do not depend on the GPU.
FORWARD = {2: Walk(128, 4, 132 * 32), 4: Walk(128, 8, 132 * 20)}
BACKWARD = {2: Walk(128, 8, 132 * 16), 4: Walk(128, 8, 132 * 12)}


def _channels_last(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


class Problem:
    """Sizes, layout and document starts of one call."""

    def __init__(self, x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, dy: Tensor | None = None) -> None:
        self.batch, self.tokens, self.width = x.shape
        self.rows, self.kernel, self.device = self.batch * self.tokens, weight.shape[1], x.device
        if self.rows >= 2**31 - 2**20:
            raise ValueError(f"x: expected fewer than {2**31 - 2**20} rows (B*T), got {self.rows}")
        self.x = _channels_last(x)
        self.dy = None if dy is None else _channels_last(dy)
        sources = (self.x,) if self.dy is None else (self.x, self.dy)
        self.flat = self.batch == 1 or all(s.stride(0) == self.tokens * s.stride(1) for s in sources)
        self.dense = self.flat and all(s.stride(1) == self.width for s in sources)
        self.documents, self.cu_seqlens, self.healthy = 0, None, None
        self.kind = (ONE_DOCUMENT if self.batch == 1 else BATCH_ROWS).value
        if cu_seqlens is not None:
            if cu_seqlens.device.type == "cpu":
                read_boundaries(cu_seqlens, self.tokens)
            self.set_boundaries(cu_seqlens.to(self.device, non_blocking=True).contiguous())

    def set_boundaries(self, cu_seqlens: Tensor) -> None:
        """Packed documents; `healthy` tells on the device whether their boundaries are good."""
        self.kind = PACKED.value
        self.documents, self.cu_seqlens = cu_seqlens.shape[0] - 1, cu_seqlens
        self.healthy = torch.empty(1, dtype=torch.int32, device=self.device)
        check_kernel[(1,)](
            cu_seqlens, self.healthy, self.rows, self.documents, BLOCK=1024, num_warps=4, **OPTIONS
        )  # fmt: skip

    def plan(self, walk: Walk) -> tuple[int, int, dict[str, int]]:
        """Rows per span, number of spans and the tile constants; many taps take fewer channels, to fit registers."""
        channels = max(32, walk.channels * 4 // max(4, 1 << (self.kernel - 1).bit_length()))
        channels = min(channels, max(32, 1 << (self.width - 1).bit_length()))
        tiles = -(-self.width // channels)
        span = max(-(-self.rows // max(1, walk.programs // tiles)), MINIMUM_SPAN)
        span = -(-span // walk.rows) * walk.rows
        return span, -(-self.rows // span), {"BC": channels, "R": walk.rows, "num_warps": walk.warps}

    def sizes(self, span: int) -> tuple[int, int, int, int, int]:
        """rows, tokens, span, documents and the steps of a search among the documents."""
        return self.rows, self.tokens, span, self.documents, self.documents.bit_length()

    def facts(self, bias: Tensor | None, activation: str | None) -> dict[str, Any]:
        return {
            "D": self.width,
            "K": self.kernel,
            "FLAT": self.flat,
            "DOCUMENTS": self.kind,
            "HAS_BIAS": bias is not None,
            "SILU": activation is not None,
        }


def _parameters(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.contiguous(), None if bias is None else bias.contiguous()


def launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> Tensor:
    """Arguments as the raw op's; returns `[B, T, D]` in x's dtype."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    with on_device(x.device):
        p = Problem(x, weight, cu_seqlens)
        if p.healthy is not None:
            torch._assert_async(p.healthy, BAD_CU_SEQLENS)
        span, spans, tile = p.plan(FORWARD[x.element_size()])
        forward_kernel[(spans * -(-p.width // tile["BC"]),)](
            p.x, *_parameters(weight, bias), p.cu_seqlens, p.healthy, y, *p.sizes(span), *p.x.stride()[:2],
            **p.facts(bias, activation), **tile, **OPTIONS,
        )  # fmt: skip
    return y


def launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx, dweight and dbias (empty without a bias), each in its input's dtype."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    dbias = torch.empty(0 if bias is None else bias.shape, dtype=weight.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    with on_device(x.device):
        p = Problem(x, weight, cu_seqlens, dy)
        span, spans, tile = p.plan(BACKWARD[x.element_size()])
        facts = p.facts(bias, activation)
        sums = p.kernel + (bias is not None)
        partial = torch.empty((spans, sums, p.width), dtype=torch.float32, device=p.device)
        backward_kernel[(spans * -(-p.width // tile["BC"]),)](
            p.dy, p.x, *_parameters(weight, bias), p.cu_seqlens, p.healthy, dx, partial, *p.sizes(span),
            *p.dy.stride()[:2], *p.x.stride()[:2], **facts, **tile, DENSE=p.dense, **OPTIONS,
        )  # fmt: skip
        rows, block = PARTIAL_BLOCK
        weight_kernel[(-(-p.width // block), sums)](
            partial, p.healthy, dweight, dbias, spans, D=p.width, K=p.kernel, HAS_BIAS=bias is not None,
            CHECKED=p.healthy is not None, BS=rows, BLOCK=block, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return dx, dweight, dbias
