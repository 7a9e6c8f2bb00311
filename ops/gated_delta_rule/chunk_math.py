"""One chunk of the gated delta rule, forward and backward, on tiles `[documents, HV, 64, width]`.

Per value head, with rows r, i of one chunk, G the inclusive cumulative sum of g, gamma = e^G and
Gamma_ri = e^(G_r - G_i) for i <= r, else 0:

* X is strictly lower and free of gates: x_r = -(l_r + sum_{i<r} l_ri beta_i x_i) with l = stril(K K^T). Then
  (I + D_beta (Gamma * stril K K^T))^-1 = I + D_beta (Gamma * X), and |X| <= 1 for |k| <= 1 and beta in [0, 2].
* E = V - gamma * (K S0), delta = E + (Gamma * X)(beta * E), V_new = beta * delta: the identity is never rounded.
* O = gamma * (Q S0) + tril(Gamma * Q K^T) V_new and S1 = gamma_C S0 + K^T ((gamma_C / gamma) * V_new).

Q carries the scale, and both Q and K their normalisation, as row factors. Rows past a document's end are zero in q, k,
v, beta and g, so they add nothing. The recurrence is that of Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024);
the backward is its exact adjoint.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..varlen import CHUNK

# e^-88 is the last power above fp32's subnormals; -inf would make the difference of two sums NaN.
LOWEST_GATE = -88.0


class Gates(NamedTuple):
    """`gcum` [.., 64], `decay` Gamma [.., 64, 64], `gamma` [.., 64, 1], `to_end` gamma_C / gamma, `end` gamma_C."""

    gcum: torch.Tensor
    decay: torch.Tensor
    gamma: torch.Tensor
    to_end: torch.Tensor
    end: torch.Tensor


def gates(g: torch.Tensor) -> Gates:
    """Decays of a chunk from its log gates `[.., 64]`.

    Sums run in float64: sixty-four gates of -88 reach -5632, where neighbouring fp32 numbers lie 5e-4 apart, and the
    difference of two such sums would carry that error into a decay of order one. Differences are masked before exp.
    """
    total = g.clamp_min(LOWEST_GATE).double().cumsum(-1)
    ahead = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).to(g.dtype).masked_fill_(ahead, float("-inf")).exp_()
    gcum = total.to(g.dtype)
    to_end = (total[..., -1:] - total).to(g.dtype).exp_()
    return Gates(gcum, decay, gcum.exp()[..., None], to_end[..., None], gcum[..., -1, None, None].exp())


def inverse_core(pairs: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """X of the module docstring: K K^T `[n, H, 64, 64]`, beta `[n, HV, 64]` -> `[n, HV, 64, 64]`.

    Forward substitution, the stable way: a Neumann series loses every digit in fp32 for (nearly) equal keys.
    """
    lower = expand_heads(pairs.tril(-1), beta.shape[1])
    return torch.linalg.solve_triangular(lower * beta[..., None, :], -lower, upper=False, unitriangular=True).tril_(-1)


def expand_heads(tile: torch.Tensor, value_heads: int) -> torch.Tensor:
    """`[n, H, ...]` -> contiguous `[n, HV, ...]`: value head j reads key head j // (HV / H)."""
    n, heads = tile.shape[:2]
    shape = (n, heads, value_heads // heads, *tile.shape[2:])
    return tile.unsqueeze(2).expand(shape).reshape(n, value_heads, *tile.shape[2:])


def reduce_heads(tile: torch.Tensor, heads: int) -> torch.Tensor:
    """`[n, HV, ...]` -> `[n, H, ...]`: the group's sum in head order, so the same bits every time."""
    grouped = tile.unflatten(1, (heads, -1))
    total = grouped[:, :, 0].clone()
    for member in range(1, grouped.shape[2]):
        total += grouped[:, :, member]
    return total


def delta_rows(
    k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, gates: Gates, x: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """delta: what the state lacks of v, each row after the rows before it; k `[n, HV, 64, K]`, beta `[.., 64, 1]`."""
    error = v.sub_(gates.gamma * (k @ state))
    return error + (gates.decay * x) @ (beta * error)


def outputs(q: torch.Tensor, k: torch.Tensor, v_new: torch.Tensor, gates: Gates, state: torch.Tensor) -> torch.Tensor:
    return (q @ state).mul_(gates.gamma) + (q @ k.mT).mul_(gates.decay) @ v_new


def next_state(k: torch.Tensor, v_new: torch.Tensor, gates: Gates, state: torch.Tensor) -> torch.Tensor:
    return gates.end * state + k.mT @ (gates.to_end * v_new)


class ChunkGradients(NamedTuple):
    """Gradients of one chunk per value head; `dq` is with respect to the scaled, normalised q, `dk` likewise."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dstate: torch.Tensor


def chunk_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    beta: torch.Tensor,
    gates: Gates,
    x: torch.Tensor,
    state: torch.Tensor,
    delta: torch.Tensor,
    do: torch.Tensor,
    dstate: torch.Tensor,
) -> ChunkGradients:
    """Adjoint of one chunk: `do` `[n, HV, 64, V]` and `dstate`, that of the state after the chunk, `[n, HV, K, V]`.

    No division anywhere, so beta = 0 and gamma = 0 are plain points.
    """
    v_new = beta * delta
    qk = (q @ k.mT).mul_(gates.decay)
    dv_new = (qk.mT @ do).add_(gates.to_end * (k @ dstate))
    dr = dv_new + (gates.decay * x).mT @ (beta * dv_new)
    dbeta = (dr * delta).sum(-1)
    dv = dr.mul_(beta)
    score = do @ v_new.mT
    dkk = (dv @ v_new.mT).mul_(gates.decay).tril_(-1).neg_()
    pairs = qk.mul_(score).add_((k @ k.mT).mul_(dkk))
    dqk = score.mul_(gates.decay)
    dz = -gates.gamma * dv
    do_decayed = gates.gamma * do
    dq_start, dk_start = do_decayed @ state.mT, dz @ state.mT
    dk_end = (v_new @ dstate.mT).mul_(gates.to_end)
    # Two sums over one axis each: a single sum to one element per head would split by thread count on one document.
    across = gates.end[..., 0] * (state * dstate).sum(-1).sum(-1, keepdim=True)
    dg = _log_gate_gradient(pairs, (q * dq_start).sum(-1) + (k * dk_start).sum(-1), (k * dk_end).sum(-1)) + across
    dq = (dqk @ k).add_(dq_start)
    dk = (dqk.mT @ q).add_((dkk + dkk.mT) @ k).add_(dk_end).add_(dk_start)
    before = (gates.end * dstate).add_(q.mT @ do_decayed).add_(k.mT @ dz)
    return ChunkGradients(dq, dk, dv, dg, dbeta, before)


def _log_gate_gradient(pairs: torch.Tensor, from_start: torch.Tensor, to_end: torch.Tensor) -> torch.Tensor:
    """dg_s: the sum of everything that decays across row s.

    `pairs` [.., r, i] is what depends on e^(G_r - G_i), crossing s if i < s <= r; `from_start` [.., r] on e^(G_r),
    crossing if s <= r; `to_end` [.., i] on e^(G_C - G_i), crossing if i < s. Summing the crossings themselves, not the
    reverse cumulative sum of row minus column sums, keeps a gradient of 1e-26 (g = -60) right instead of 1e-8 noise.
    """
    before = torch.nn.functional.pad(pairs.tril_(-1)[..., :-1].cumsum(-1), (1, 0))
    after_start = from_start.flip(-1).cumsum(-1).flip(-1)
    return before.tril_().sum(-2) + after_start + torch.nn.functional.pad(to_end[..., :-1].cumsum(-1), (1, 0))
