"""The token recurrence of `oracles.gdn` with each document written as one linear system: quick enough for a fuzzer.

With G the cumulative decay of a document, D_ij = exp(G_i - G_j) for j <= i, and S_0 its initial state,
`(I + strictly lower(beta_i D_ij k_i . k_j)) u = beta (v - exp(G) k S_0)`, `o = lower(D_ij q_i . k_j) u + exp(G) q S_0`
and `S = exp(G_T) S_0 + sum_j exp(G_T - G_j) k_j u_j^T`. No chunks, no tapes; gradients by autograd, in float64.

With `inverse_dtype` documents are cut into chunks of 64, and the inverse of a chunk's system is I + D_beta (D X) with
`X = -(I + L D_beta)^-1 L`, L = strictly lower(k k^T), rounded to that dtype: what a 16-bit tape loses, and no more.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from oracles.gdn import l2norm

CHUNK = 64


class _RoundedInverse(torch.autograd.Function):
    """system^-1 known by an `inverse` that is not exact, with the gradient of the system that an exact one has."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, _: Tensor, known: Tensor, inverse: Tensor) -> Tensor:
        u = inverse @ known
        ctx.save_for_backward(inverse, u)
        return u

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, du: Tensor) -> tuple[Tensor, Tensor, None]:
        inverse, u = ctx.saved_tensors
        dknown = inverse.mT @ du
        return -dknown @ u.mT, dknown, None


@torch.no_grad()
def _inverse(k: Tensor, beta: Tensor, ratio: Tensor, dtype: torch.dtype) -> Tensor:
    lower = (k @ k.mT).tril(-1)
    x = torch.linalg.solve_triangular(lower * beta[:, None, :], -lower, upper=False, unitriangular=True).tril(-1)
    return torch.eye(k.shape[1], dtype=k.dtype) + beta[:, :, None] * ratio * x.to(dtype).to(k.dtype)


def _document(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, inverse_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """One document: q, k `[HV,T,K]`, v `[HV,T,V]`, g, beta `[HV,T]`, state `[HV,K,V]`."""
    length = g.shape[1]
    decay = g.cumsum(1)
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    # Masked before exp: above the diagonal the difference may overflow.
    ratio = (decay[:, :, None] - decay[:, None, :]).masked_fill(~lower, -torch.inf).exp()
    system = (beta[:, :, None] * (k @ k.mT) * ratio).tril(-1) + torch.eye(length, dtype=q.dtype)
    since = decay.exp()[:, :, None]
    known = beta[:, :, None] * (v - since * (k @ state))
    if inverse_dtype is None:
        u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    else:
        u = _RoundedInverse.apply(system, known, _inverse(k, beta, ratio, inverse_dtype))
    o = ((q @ k.mT) * ratio) @ u + since * (q @ state)
    return o, since[:, -1:] * state + (k * ratio[:, -1, :, None]).mT @ u


def value_head_rows(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, use_qk_l2norm: bool
) -> list[Tensor]:
    """The five with scaled q and k, of norm 1 if asked, for each value head."""
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[2] // q.shape[2]
    return [(q * scale).repeat_interleave(group, 2), k.repeat_interleave(group, 2), v, g, beta]


def document_spans(q: Tensor, boundaries: tuple[int, ...] | None) -> list[tuple[int, int, int]]:
    """(batch row, start, end) of each document."""
    if boundaries is None:
        return [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    return [(0, start, end) for start, end in pairwise(boundaries)]


def gated_delta_rule_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    boundaries: tuple[int, ...] | None,
    scale: float,
    use_qk_l2norm: bool,
    inverse_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`(o, final_state)` of float64 `[B,T,..]`: a document per batch row, or one row cut at `boundaries`."""
    rows = value_head_rows(q, k, v, g, beta, scale, use_qk_l2norm)
    spans = document_spans(q, boundaries)
    outputs, states = [], []
    for n, (b, start, end) in enumerate(spans):
        if start == end:
            states.append(initial_state[n])
            continue
        state, length = initial_state[n], end - start if inverse_dtype is None else CHUNK
        for first in range(start, end, length):
            own = slice(first, min(first + length, end))
            o, state = _document(*(x[b, own].transpose(0, 1) for x in rows), state, inverse_dtype)
            outputs.append(o.transpose(0, 1))
        states.append(state)
    if boundaries is not None:
        outputs.append(torch.zeros_like(v[0, boundaries[-1] :]))
    o = torch.cat(outputs).reshape(v.shape) if outputs else torch.zeros_like(v)
    return o, torch.stack(states) if states else initial_state * 1.0
