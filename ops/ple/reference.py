"""PLE gate and convolution on ATen ops, in the scalar form: forward, and what both directions share.

Everything after the gate depends on a token only through two numbers per (token, stream) and the shared value row:

    score = r_q r_k <q (1+w_q), k (1+w_k)> / sqrt(C)      r_x = rsqrt(mean(x^2) + eps) per stream
    gate  = sigmoid(sign(score) sqrt(max(|score|, 1e-6)))  sign(0) = 0
    r_c   = rsqrt(gate^2 mean(v^2) + eps)                  a = gate r_c mask
    y[t,n,c] = (1+w_c[n,c]) sum_j w[n,c,j] a[t-s_j,n] v[t-s_j,c]      s_j = (K-1-j) dilation
    out   = gate mask v + silu(y)

so a chunk of rows needs a few [rows, N*C] buffers and [T, N] scalars, never a whole-sequence intermediate.

Only operations whose result for an element does not depend on where it lies in the buffer are used (add, multiply,
divide, square root, exp, row sums): ATen's sigmoid and silu round differently in a vector body and in its tail (145 of
4,007 values with AVX-512), which would tie a row's bits to the chunk it falls in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .chunking import FORWARD_BUFFERS, forward_chunk_rows, halo_rows

GATE, QUERY_RSTD, KEY_RSTD, CONV_RSTD, SCORE = range(5)
SCORE_FLOOR = 1e-6


@dataclass(frozen=True)
class Weights:
    """Weights in the compute dtype: zero-centred norms as 1 + w, [N,C]; taps [K,N,C]."""

    query: Tensor
    key: Tensor
    conv: Tensor
    taps: Tensor

    @classmethod
    def load(cls, query: Tensor, key: Tensor, conv: Tensor, taps: Tensor, streams: int, dtype: torch.dtype) -> Weights:
        query, key, conv = (w.to(dtype).reshape(streams, -1) + 1 for w in (query, key, conv))
        taps = taps.reshape(streams, query.shape[1], -1).permute(2, 0, 1).to(dtype).contiguous()
        return cls(query, key, conv, taps)


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of one batch row, with what the convolution may read around them."""

    batch: int
    start: int
    stop: int
    halo: int
    cu_seqlens: Tensor | None
    conv_mask: Tensor | None

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def begin(self) -> int:
        """First row of the history that exists; rows before it are zero."""
        return max(self.start - self.halo, 0)

    @property
    def missing(self) -> int:
        return self.halo - (self.start - self.begin)

    def edges(self) -> tuple[Tensor | None, Tensor | None]:
        """Distance [rows] of each row to the first row of its document and to the row after its last."""
        if self.cu_seqlens is None:
            return None, None
        row = torch.arange(self.start, self.stop, device=self.cu_seqlens.device)
        document = torch.searchsorted(self.cu_seqlens[1:], row, right=True)
        return row - self.cu_seqlens[document], self.cu_seqlens[document + 1] - row

    def mask(self, begin: int, dtype: torch.dtype) -> Tensor | None:
        """`conv_mask` of rows [begin, stop) as [rows, 1]."""
        if self.conv_mask is None:
            return None
        return self.conv_mask[self.batch, begin : self.stop].to(dtype).unsqueeze(1)

    def history(self, stats: Tensor) -> Tensor:
        """`a` = gate * r_c * mask of the rows and the halo before them, [halo + rows, N]."""
        tape = stats[:, self.batch, self.begin : self.stop]
        a = tape.new_zeros(self.halo + self.count, tape.shape[-1])
        torch.mul(tape[GATE], tape[CONV_RSTD], out=a[self.missing :])
        mask = self.mask(self.begin, a.dtype)
        return a if mask is None else a.mul_(torch.nn.functional.pad(mask, (0, 0, self.missing, 0)))

    def load_value(self, value: Tensor, buffer: Tensor) -> Tensor:
        """`value` of the same rows as `history`, [halo + rows, C], zero before the first row."""
        buffer = buffer[: self.halo + self.count]
        buffer[: self.missing].zero_()
        buffer[self.missing :].copy_(value[self.batch, self.begin : self.stop])
        return buffer


def tap_product(rows: Rows, a: Tensor, v: Tensor, shift: int, behind: Tensor | None, out: Tensor) -> Tensor:
    """(a v) of `shift` rows earlier, zero where that row belongs to another document (also if it holds NaN)."""
    first = rows.halo - shift
    last = first + rows.count
    torch.mul(a[first:last, :, None], v[first:last, None, :], out=out)
    if shift and behind is not None:
        out.masked_fill_((behind < shift)[:, None, None], 0)
    return out


def conv_output(
    rows: Rows, a: Tensor, v: Tensor, behind: Tensor | None, weights: Weights, dilation: int, out: Tensor, spare: Tensor
) -> Tensor:
    """y before its silu, into `out`."""
    kernel = weights.taps.shape[0]
    for tap in range(kernel):
        target = spare if tap else out
        tap_product(rows, a, v, (kernel - 1 - tap) * dilation, behind, target).mul_(weights.taps[tap])
        if tap:
            out.add_(spare)
    return out.mul_(weights.conv)


def _row_scalars(
    rows: Rows, hidden: Tensor, key: Tensor, value: Tensor, weights: Weights, eps: float, scratch: Tensor, tape: Tensor
) -> None:
    """Fills `tape` [5, rows, N] = gate, r_q, r_k, r_c, score."""
    q, k, product = scratch
    channels = value.shape[-1]
    q.copy_(hidden[rows.batch, rows.start : rows.stop].unflatten(-1, q.shape[1:]))
    k.copy_(key[rows.batch, rows.start : rows.stop].unflatten(-1, k.shape[1:]))
    for x, slot in ((q, QUERY_RSTD), (k, KEY_RSTD)):
        torch.mul(x, x, out=product)
        torch.rsqrt(product.sum(-1).div_(channels).add_(eps), out=tape[slot])
    # q is normalised before the product: q*k of two tiny rows would underflow to 0 and lose the sign of the score.
    q.mul_(tape[QUERY_RSTD].unsqueeze(-1)).mul_(k).mul_(weights.query).mul_(weights.key)
    score = torch.sum(q, -1).mul_(tape[KEY_RSTD]).div_(math.sqrt(channels))
    tape[SCORE].copy_(score)
    root = score.abs().clamp_min_(SCORE_FLOOR).sqrt_().mul_(score.sign())
    torch.reciprocal(root.neg_().exp_().add_(1), out=tape[GATE])
    v = product[:, 0]
    v.copy_(value[rows.batch, rows.start : rows.stop])
    mean = v.mul_(v).sum(-1, keepdim=True).div_(channels)
    torch.rsqrt((tape[GATE] * tape[GATE]).mul_(mean).add_(eps), out=tape[CONV_RSTD])


def ple_gate_conv_reference(
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    conv_weight: Tensor,
    cu_seqlens: Tensor | None,
    live: int,
    conv_mask: Tensor | None,
    dilation: int,
    eps: float,
    workspace_bytes: int,
    residual: bool,
) -> tuple[Tensor, Tensor]:
    """Returns `out` [B,T,N*C] in hidden's dtype and `stats` [5,B,T,N].

    Arguments are the raw op's, with `cu_seqlens` int64 on hidden's device and `live` its last value (T without it).
    """
    batch, tokens, width = hidden.shape
    channels, kernel = value.shape[-1], conv_weight.shape[-1]
    streams, halo = width // channels, halo_rows(kernel, dilation)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    out = hidden.new_empty(hidden.shape)
    stats = hidden.new_empty((5, batch, tokens, streams), dtype=dtype)
    out[:, live:].zero_()
    stats[:, :, live:].zero_()
    chunk = forward_chunk_rows(workspace_bytes, live, streams, channels, kernel, dilation, dtype.itemsize)
    weights = Weights.load(norm_query_weight, norm_key_weight, norm_conv_weight, conv_weight, streams, dtype)
    scratch = hidden.new_empty((FORWARD_BUFFERS, chunk, streams, channels), dtype=dtype)
    v_rows = hidden.new_empty((halo + chunk, channels), dtype=dtype)
    for b in range(batch):
        for start in range(0, live, chunk):
            rows = Rows(b, start, min(start + chunk, live), halo, cu_seqlens, conv_mask)
            part = scratch[:, : rows.count]
            _row_scalars(rows, hidden, key, value, weights, eps, part, stats[:, b, rows.start : rows.stop])
            y, spare, _ = part
            v = rows.load_value(value, v_rows)
            conv_output(rows, rows.history(stats), v, rows.edges()[0], weights, dilation, y, spare)
            torch.neg(y, out=spare)
            y.div_(spare.exp_().add_(1))
            gate, mask = stats[GATE, b, rows.start : rows.stop], rows.mask(rows.start, dtype)
            gate = gate if mask is None else gate * mask
            y.add_(torch.mul(gate.unsqueeze(-1), v[halo:, None], out=spare))
            out[b, rows.start : rows.stop].copy_(y.flatten(1))
    # Two roundings, as `hidden + ple(...)` makes them: PLE's own output is rounded to hidden's dtype before the sum.
    return (out.add_(hidden) if residual else out), stats
