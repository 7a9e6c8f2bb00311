"""float64 oracle of the gated delta rule: one token at a time, gradients by autograd. Slow and obvious."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

import ple_gdn

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Rows divided by sqrt(sum of squares + 1e-6)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class Case(NamedTuple):
    """Inputs `[1, T, heads, width]`, boundaries, and the gradients that arrive from above."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor
    boundaries: tuple[int, ...]
    do: torch.Tensor
    dfinal_state: torch.Tensor


def token_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    boundaries: tuple[int, ...],
    scale: float,
    use_qk_l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(o, final_state)`; rows after the last boundary are zero."""
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[2] // q.shape[2]
    q, k = q[0].repeat_interleave(group, 1), k[0].repeat_interleave(group, 1)
    rows, states = [], []
    for n, (start, end) in enumerate(pairwise(boundaries)):
        state = initial_state[n]
        for t in range(start, end):
            state = state * g[0, t].exp()[:, None, None]
            u = beta[0, t][:, None] * (v[0, t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + torch.einsum("hk,hv->hkv", k[t], u)
            rows.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
        states.append(state)
    rows += [torch.zeros_like(v[0, 0])] * (v.shape[1] - boundaries[-1])
    return torch.stack(rows)[None], torch.stack(states)


def oracle(case: Case, scale: float, use_qk_l2norm: bool) -> dict[str, torch.Tensor]:
    """Outputs and all six gradients in float64, from the case's values as they are."""
    leaves = [x.detach().double().requires_grad_() for x in case[:6]]
    o, final_state = token_recurrence(*leaves, case.boundaries, scale, use_qk_l2norm)
    loss = (o * case.do.double()).sum() + (final_state * case.dfinal_state.double()).sum()
    return dict(zip(NAMES, (o.detach(), final_state.detach(), *torch.autograd.grad(loss, leaves)), strict=True))


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the error over that of the expected values."""
    error = (actual.double() - expected).square().mean().sqrt()
    return (error / expected.square().mean().sqrt().clamp_min(1e-30)).item()


def make_case(
    lengths: tuple[int, ...],
    *,
    heads: int = 2,
    value_heads: int = 4,
    key_width: int = 16,
    value_width: int = 32,
    mode: str = "plain",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    trailing: int = 0,
) -> Case:
    """A packed batch; `mode` picks keys and gates that stress the math, `trailing` adds rows of no document."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(lengths) + trailing
    documents = len(lengths)
    q, k = normal(1, tokens, heads, key_width), normal(1, tokens, heads, key_width)
    g = torch.nn.functional.logsigmoid(normal(1, tokens, value_heads)) / 4
    beta = torch.sigmoid(normal(1, tokens, value_heads))
    alike = {"equal_keys": 0.0, "nearer_equal_keys": 0.05, "near_equal_keys": 0.3}  # noise beside a common part
    if mode == "no_decay" or mode in alike:
        g = torch.zeros_like(g)
    if mode == "strong_decay":
        g = torch.full_like(g, -60.0)
    if mode == "mixed_decay":
        g = torch.where(torch.rand(g.shape, generator=generator) < 0.5, -88.0, g)
    if mode == "one_reset":
        g = torch.zeros_like(g)
        g[:, tokens // 2] = -1e4
    if mode == "beta_one" or mode in alike:
        beta = torch.ones_like(beta)
    if mode == "beta_two":
        beta = torch.full_like(beta, 2.0)
    if mode == "beta_zero":
        beta = torch.where(torch.rand(beta.shape, generator=generator) < 0.3, 0.0, beta)
    if mode in alike:
        k = k[:, :1] + alike[mode] * k
    if mode == "zero_keys":
        k = torch.where(torch.rand(1, tokens, 1, 1, generator=generator) < 0.3, 0.0, k)
    if mode == "orthogonal_query":
        q[..., key_width // 2 :] = 0.0
        k[..., : key_width // 2] = 0.0
    q, k = (x.to(dtype) for x in (q, k))
    v, do = (normal(1, tokens, value_heads, value_width).to(dtype) for _ in range(2))
    size = 100.0 if mode == "large_state" else 1.0
    states = [size * normal(documents, value_heads, key_width, value_width) for _ in range(2)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    boundaries = (0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist())
    return Case(q, k, v, g.to(wide), beta.to(wide), states[0].to(wide), boundaries, do, states[1].to(wide))


def run_front(
    case: Case, *, use_qk_l2norm: bool = True, packed: bool = True, **options: object
) -> dict[str, torch.Tensor]:
    """Outputs and the six gradients of `ple_gdn.gated_delta_rule` on the case, by the oracle's names."""
    leaves = [x.detach().requires_grad_() for x in case[:6]]  # a clone would be dense
    boundaries = torch.tensor(case.boundaries) if packed else None
    options = {"cu_seqlens": boundaries, **options}
    o, final_state = ple_gdn.gated_delta_rule(
        *leaves[:5], initial_state=leaves[5], output_final_state=True, use_qk_l2norm=use_qk_l2norm, **options
    )
    grads = torch.autograd.grad((o, final_state), leaves, (case.do, case.dfinal_state))
    return dict(zip(NAMES, (o.detach(), final_state.detach(), *grads), strict=True))


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name in NAMES:
        assert torch.equal(actual[name], expected[name]), name
