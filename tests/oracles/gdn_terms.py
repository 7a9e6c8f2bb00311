"""The inner products that dg and dbeta of a token are: what is left of rounding when their terms cancel.

With S' = exp(g) S the decayed state, e = v - S'^T k and u = beta e, the recurrence has `dg = <S', dS'>`, K V terms, and
`dbeta = <e, du>`, V terms. Where the vectors were rounded to u of each element, a sum has an error of u times the root
of the sum of squares of its terms, however small it is itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracles.gdn_dense import document_spans, value_head_rows


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
    rows = value_head_rows(q, k, v, g, beta, scale, use_qk_l2norm)
    sums, roots = (torch.zeros(2, *g.shape, dtype=torch.float64) for _ in range(2))
    for n, (b, start, end) in enumerate(document_spans(q, boundaries)):
        own = (x[b, start:end] for x in rows)
        made = _document(*own, initial_state[n], do[b, start:end], dfinal_state[n])
        sums[:, b, start:end], roots[:, b, start:end] = made
    return sums, roots
