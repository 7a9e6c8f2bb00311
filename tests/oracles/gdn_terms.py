"""The inner products that dg and dbeta of a token are: what is left of rounding when their terms cancel.

With S' = exp(g) S the decayed state, e = v - S'^T k and u = beta e, the recurrence has `dg = <S', dS'>`, K V terms, and
`dbeta = <e, du>`, V terms. Where the vectors were rounded to u of each element, a sum has an error of u times the root
of the sum of squares of its terms, however small it is itself.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from oracles.gdn import l2norm


def _document(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, do: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums of dg and dbeta `[2,T,HV]`, and the roots of the sums of squares: q, k `[T,HV,K]`, v, do `[T,HV,V]`."""
    decayed, errors = [], []
    for t in range(g.shape[0]):
        decayed.append(state * g[t].exp()[:, None, None])
        errors.append(v[t] - torch.einsum("hk,hkv->hv", k[t], decayed[t]))
        state = decayed[t] + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * errors[t])
    sums, roots = (torch.zeros(2, *g.shape, dtype=torch.float64) for _ in range(2))
    for t in reversed(range(g.shape[0])):
        dstate = dstate + torch.einsum("hk,hv->hkv", q[t], do[t])
        du = torch.einsum("hk,hkv->hv", k[t], dstate)
        dstate = dstate - torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * du)
        for at, terms in enumerate(((decayed[t] * dstate).flatten(1), errors[t] * du)):
            sums[at, t], roots[at, t] = terms.sum(1), terms.square().sum(1).sqrt()
        dstate = dstate * g[t].exp()[:, None, None]
    return sums, roots


def gate_gradient_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    boundaries: tuple[int, ...] | None,
    scale: float,
    use_qk_l2norm: bool,
    do: Tensor,
    dfinal_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Of float64 `[B,T,..]`: (dg, dbeta) as sums `[2,B,T,HV]`, and the root of the sum of squares of their terms."""
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[2] // q.shape[2]
    rows = [(q * scale).repeat_interleave(group, 2), k.repeat_interleave(group, 2), v, g, beta]
    spans = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    if boundaries is not None:
        spans = [(0, start, end) for start, end in pairwise(boundaries)]
    sums, roots = (torch.zeros(2, *g.shape, dtype=torch.float64) for _ in range(2))
    for n, (b, start, end) in enumerate(spans):
        own = (x[b, start:end] for x in rows)
        made = _document(*own, initial_state[n], do[b, start:end], dfinal_state[n])
        sums[:, b, start:end], roots[:, b, start:end] = made
    return sums, roots
