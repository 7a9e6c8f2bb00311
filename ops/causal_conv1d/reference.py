"""Short causal depthwise convolution on ATen ops: a loop over taps, never over tokens, and no host read.

Exact where eager rounds (`F.conv1d`, then `F.silu`, in the weight's dtype): the sum over taps is taken in float32 and
rounded once, silu is taken in float32 of that rounded value and rounded again; the backward rounds behind silu and
behind the convolution likewise. Buffers follow x's strides, so a transposed view is not copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Distance [T] of each row to the first row of its document, and to the row after its last.

    Rows of no document have -1 and 0, so that no tap of theirs, not even their own row, is inside.
    """

    behind: Tensor
    left: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> Documents | None:
        if cu_seqlens is None:
            return None
        cu_seqlens = cu_seqlens.to(device, torch.int64).contiguous()
        row = torch.arange(tokens, device=device)
        document = torch.searchsorted(cu_seqlens[1:], row, right=True).clamp_(max=cu_seqlens.shape[0] - 2)
        inside = row < cu_seqlens[-1]
        behind = torch.where(inside, row - cu_seqlens[document], -1)
        left = torch.where(inside, cu_seqlens[document + 1] - row, 0)
        return cls(behind, left)

    def drop_history(self, product: Tensor, shift: int) -> Tensor:
        """Zeroes rows [shift, T) of `product` whose row `shift` earlier is not theirs, even where it holds NaN."""
        return product.masked_fill_((self.behind[shift:] < shift)[:, None], 0)

    def drop_future(self, product: Tensor, shift: int) -> Tensor:
        """Zeroes rows [0, T - shift) of `product` whose row `shift` later is not theirs."""
        return product.masked_fill_((self.left[: self.left.shape[0] - shift] <= shift)[:, None], 0)


def _shifts(weight: Tensor, tokens: int) -> range:
    """Distances whose taps reach a row at all."""
    return range(min(weight.shape[1], tokens))


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Documents | None) -> Tensor:
    """Sum over taps in x's dtype (the compute dtype), newest tap first."""
    tokens, kernel = x.shape[1], weight.shape[1]
    out = torch.zeros_like(x)
    for shift in _shifts(weight, tokens):
        product = x[:, : tokens - shift] * weight[:, kernel - 1 - shift]
        if documents is not None:
            documents.drop_history(product, shift)
        out[:, shift:].add_(product)
    if bias is not None:
        out.add_(bias)
        if documents is not None:
            documents.drop_history(out, 0)
    return out


def _load(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Arguments in the compute dtype, x rounded to the weight's dtype first as eager's cast does; dense, since the
    order of the sums over rows follows strides."""
    compute = torch.promote_types(weight.dtype, torch.float32)
    weight = weight.contiguous()
    return x.contiguous().to(weight.dtype).to(compute), weight.to(compute), None if bias is None else bias.to(compute)


def _round(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).to(value.dtype)


def _sigmoid_denominator(y: Tensor) -> Tensor:
    # 1 + exp(-y) by itself: ATen's silu rounds differently in a vector body and its tail, which would tie a row's bits
    # to its place in the pack.
    return y.neg().exp_().add_(1)


def causal_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> Tensor:
    """Arguments as the raw op's; returns `[B, T, D]` in x's dtype."""
    documents = Documents.of(cu_seqlens, x.shape[1], x.device)
    y = _round(_conv(*_load(x, weight, bias), documents), weight.dtype)
    if activation is not None:
        y = y / _sigmoid_denominator(y)
    return y.to(weight.dtype).to(x.dtype).contiguous()


def causal_conv1d_backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx, dweight and dbias (empty without a bias), each in its input's dtype."""
    tokens, kernel = x.shape[1], weight.shape[1]
    documents = Documents.of(cu_seqlens, tokens, x.device)
    rows, taps, offset = _load(x, weight, bias)
    grad = torch.empty_like(rows).copy_(dy)
    if x.dtype != weight.dtype:
        grad = _round(grad, weight.dtype)
    if activation is not None:
        y = _round(_conv(rows, taps, offset, documents), weight.dtype)
        sigmoid = _sigmoid_denominator(y).reciprocal_()
        slope = y.mul_(1 - sigmoid).add_(1)
        grad = _round(grad.mul_(sigmoid).mul_(slope), weight.dtype)
    if documents is not None:
        documents.drop_history(grad, 0)
    dx = torch.zeros_like(rows)
    dweight = torch.zeros_like(taps)
    for shift in _shifts(weight, tokens):
        product = grad[:, shift:] * taps[:, kernel - 1 - shift]
        if documents is not None:
            documents.drop_future(product, shift)
        dx[:, : tokens - shift].add_(product)
        product = grad[:, shift:] * rows[:, : tokens - shift]
        if documents is not None:
            documents.drop_history(product, shift)
        dweight[:, kernel - 1 - shift] = product.sum((0, 1))
    dbias = weight.new_empty(0) if bias is None else grad.sum((0, 1)).to(bias.dtype)
    return dx.to(weight.dtype).to(x.dtype).contiguous(), dweight.to(weight.dtype).contiguous(), dbias
