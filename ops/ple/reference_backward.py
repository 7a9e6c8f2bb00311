"""Backward of the PLE gate and convolution on ATen ops, in chunks of rows from the last to the first.

With dy = dout silu'(y), dn[t] = sum_j w_j dy[t + s_j] inside the document and u = dn (1+w_c):

    s1 = mask <dout, v>     s2 = mask <u, v>          dgate = s1 + s2 eps r_c^3
    ds = dgate gate (1-gate) / (2 sqrt(|score|))      where |score| >= 1e-6, else 0
    dv = sum_n gate mask dout + a u - s2 gate^3 r_c^3 v / C
    dk = r_k (q^ (1+w_q)(1+w_k) ds/sqrt(C) - k^ ds score/C)         q^ = q r_q, k^ = k r_k; dq likewise
    dw_q = (1+w_k) S, dw_k = (1+w_q) S                S = sum_t q^ k^ ds/sqrt(C)
    dw_c = sum_t dn a v      dw_j = (1+w_c) sum_t dy (a v)[t - s_j]

A chunk needs dy of the `halo` rows after it, which the chunk done before it hands over: no row is computed twice and no
row of dw is counted twice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .chunking import BACKWARD_BUFFERS, backward_chunk_rows, halo_rows
from .reference import (
    CONV_RSTD,
    GATE,
    KEY_RSTD,
    QUERY_RSTD,
    SCORE,
    SCORE_FLOOR,
    Rows,
    Weights,
    conv_output,
    tap_product,
)


class _Accumulators:
    """Weight gradients of all chunks so far, [N,C] each, in the compute dtype."""

    def __init__(self, like: Weights) -> None:
        self.score = torch.zeros_like(like.query)
        self.conv = torch.zeros_like(like.conv)
        self.taps = torch.zeros_like(like.taps)


def _silu_gradient(y: Tensor, spare: Tensor, sigmoid: Tensor) -> None:
    """y <- silu'(y) = s (1 + y (1 - s))."""
    torch.neg(y, out=sigmoid)
    sigmoid.exp_().add_(1).reciprocal_()
    y.mul_(torch.sub(1, sigmoid, out=spare)).add_(1).mul_(sigmoid)


def _ahead(dy: Tensor, tail: Tensor, shift: int, out: Tensor) -> Tensor:
    """`dy` of `shift` rows later; rows past the chunk come from `tail`, the first rows of the chunk after it."""
    inside = max(dy.shape[0] - shift, 0)
    out[:inside].copy_(dy[shift:])
    out[inside:].copy_(tail[shift - (dy.shape[0] - inside) : shift])
    return out


def _hand_over(dy: Tensor, tail: Tensor) -> None:
    """Makes `tail` the first rows of `dy` followed by itself."""
    kept = tail.shape[0] - dy.shape[0]
    if kept > 0:
        tail[-kept:] = tail[:kept].clone()
    tail[: dy.shape[0]].copy_(dy[: tail.shape[0]])


def _conv_backward(
    rows: Rows,
    a: Tensor,
    v: Tensor,
    dy: Tensor,
    tail: Tensor,
    weights: Weights,
    dilation: int,
    grads: _Accumulators,
    dn: Tensor,
    spare: Tensor,
) -> None:
    """dn <- transposed convolution of dy; adds this chunk's share to the conv and norm weight gradients."""
    behind, left = rows.edges()
    kernel = weights.taps.shape[0]
    for tap in range(kernel):
        shift = (kernel - 1 - tap) * dilation
        grads.taps[tap].add_(tap_product(rows, a, v, shift, behind, spare).mul_(dy).sum(0))
        ahead = _ahead(dy, tail, shift, spare if tap else dn)
        if shift and left is not None:
            ahead.masked_fill_((left <= shift)[:, None, None], 0)
        ahead.mul_(weights.taps[tap])
        if tap:
            dn.add_(spare)
    torch.mul(a[rows.halo :, :, None], v[rows.halo :, None, :], out=spare)
    grads.conv.add_(spare.mul_(dn).sum(0))


def _gate_backward(
    rows: Rows, a: Tensor, v: Tensor, dout: Tensor, u: Tensor, tape: Tensor, eps: float, spare: Tensor
) -> Tensor:
    """dout[:, 0] <- dvalue; returns d(score) [rows, N]."""
    gate, rstd, score = tape[GATE], tape[CONV_RSTD], tape[SCORE]
    a, v = a[rows.halo :], v[rows.halo :, None]
    mask = rows.mask(rows.start, gate.dtype)
    s1 = torch.mul(dout, v, out=spare).sum(-1)
    s2 = torch.mul(u, v, out=spare).sum(-1)
    masked_gate = gate
    if mask is not None:
        masked_gate, s1, s2 = gate * mask, s1.mul_(mask), s2.mul_(mask)
    cubed = rstd * rstd * rstd
    dout.mul_(masked_gate.unsqueeze(-1)).add_(u.mul_(a.unsqueeze(-1)))
    norm_term = (gate * gate * gate).mul_(cubed).mul_(s2).div_(v.shape[-1])
    dout.sub_(torch.mul(norm_term.unsqueeze(-1), v, out=spare))
    for stream in range(1, dout.shape[1]):
        dout[:, 0].add_(dout[:, stream])
    dgate = s1.add_(s2.mul_(cubed).mul_(eps)).mul_(gate).mul_(1 - gate)
    magnitude = score.abs()
    dscore = dgate.div_(magnitude.clamp_min(SCORE_FLOOR).sqrt_().mul_(2))
    # Below the floor eager's clamp passes no gradient.
    return dscore.masked_fill_(magnitude < SCORE_FLOOR, 0)


def _norm_backward(
    q: Tensor, k: Tensor, dscore: Tensor, tape: Tensor, weights: Weights, grads: _Accumulators, dq: Tensor, dk: Tensor
) -> None:
    """q, k are raw rows on entry; `dq`, `dk` are filled. The norms' row reduction is dscore * score."""
    channels = q.shape[-1]
    q_rstd, k_rstd = tape[QUERY_RSTD].unsqueeze(-1), tape[KEY_RSTD].unsqueeze(-1)
    scaled = (dscore / math.sqrt(channels)).unsqueeze(-1)
    reduction = (dscore * tape[SCORE]).div_(channels).unsqueeze(-1)
    q.mul_(q_rstd)
    k.mul_(k_rstd)
    grads.score.add_(torch.mul(q, k, out=dk).mul_(scaled).sum(0))
    spare = dq
    torch.mul(q, weights.query, out=dk).mul_(weights.key).mul_(scaled)
    dk.sub_(torch.mul(k, reduction, out=spare)).mul_(k_rstd)
    k.mul_(weights.query).mul_(weights.key).mul_(scaled)
    torch.sub(k, q.mul_(reduction), out=dq).mul_(q_rstd)


def ple_gate_conv_backward_reference(
    dout: Tensor,
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
    stats: Tensor,
    dilation: int,
    eps: float,
    workspace_bytes: int,
    chunk_rows: int | None,
    residual: bool,
) -> tuple[Tensor, ...]:
    """Returns the seven gradients, each in its input's dtype; arguments as in the forward."""
    batch, _, width = hidden.shape
    channels, kernel = value.shape[-1], conv_weight.shape[-1]
    streams, halo, dtype = width // channels, halo_rows(kernel, dilation), stats.dtype
    dhidden, dkey, dvalue = (x.new_empty(x.shape) for x in (hidden, key, value))
    for grad in (dhidden, dkey, dvalue):
        grad[:, live:].zero_()
    if chunk_rows is None:
        chunk_rows = backward_chunk_rows(workspace_bytes, live, streams, channels, kernel, dilation, dtype.itemsize)
    chunk = max(min(chunk_rows, live), 1)
    weights = Weights.load(norm_query_weight, norm_key_weight, norm_conv_weight, conv_weight, streams, dtype)
    grads = _Accumulators(weights)
    scratch = hidden.new_empty((BACKWARD_BUFFERS, chunk, streams, channels), dtype=dtype)
    v_rows = hidden.new_empty((halo + chunk, channels), dtype=dtype)
    tail = hidden.new_empty((halo, streams, channels), dtype=dtype)
    for b in range(batch):
        tail.zero_()
        for start in reversed(range(0, live, chunk)):
            rows = Rows(b, start, min(start + chunk, live), halo, cu_seqlens, conv_mask)
            here = slice(rows.start, rows.stop)
            dy, g, dn, spare = scratch[:, : rows.count]
            tape, a, v = stats[:, b, here], rows.history(stats), rows.load_value(value, v_rows)
            conv_output(rows, a, v, rows.edges()[0], weights, dilation, dy, spare)
            _silu_gradient(dy, spare, g)
            g.copy_(dout[b, here].unflatten(-1, (streams, channels)))
            dy.mul_(g)
            _conv_backward(rows, a, v, dy, tail, weights, dilation, grads, dn, spare)
            _hand_over(dy, tail)
            dscore = _gate_backward(rows, a, v, g, dn.mul_(weights.conv), tape, eps, spare)
            dvalue[b, here].copy_(g[:, 0])
            # The four buffers are free again: raw q and k, then their gradients.
            q, k, dq, dk = dy, g, dn, spare
            q.copy_(hidden[b, here].unflatten(-1, (streams, channels)))
            k.copy_(key[b, here].unflatten(-1, (streams, channels)))
            _norm_backward(q, k, dscore, tape, weights, grads, dq, dk)
            dhidden[b, here].copy_(dq.flatten(1))
            dkey[b, here].copy_(dk.flatten(1))
    if residual:
        # As autograd sums the two gradients of `hidden` in eager: each already rounded to hidden's dtype.
        dhidden.add_(dout)
    dtaps = grads.taps.mul_(weights.conv).permute(1, 2, 0).reshape(conv_weight.shape)
    dquery, dconv = grads.score * weights.key, grads.conv
    dkey_weight = grads.score.mul_(weights.query)
    return (
        dhidden,
        dkey,
        dvalue,
        dkey_weight.flatten().to(norm_key_weight.dtype),
        dquery.flatten().to(norm_query_weight.dtype),
        dconv.flatten().to(norm_conv_weight.dtype),
        dtaps.to(conv_weight.dtype).contiguous(),
    )
