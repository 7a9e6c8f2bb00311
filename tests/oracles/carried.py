"""Gamma * X in float64, and rounded row by row with the errors of a column carried down it."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def gated_inverse(k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """-(I + L D)^-1 L `[n, n]` in float64, L = stril(Gamma * K K^T); k `[n, K]`, g and beta `[n]`."""
    k, G, beta = k.double(), g.double().cumsum(0), beta.double()
    L = (k @ k.T * (G[:, None] - G).tril().exp()).tril(-1)
    return -torch.linalg.solve_triangular(torch.eye(len(k)).double() + L * beta, L, upper=False)


def carried(x: Tensor, k: Tensor, g: Tensor, beta: Tensor, dtype: torch.dtype) -> Tensor:
    """x `[n, n]` rounded to `dtype`, as float64."""
    k, g, beta = k.double(), g.double(), beta.double()
    rounded, error = torch.zeros_like(x), torch.zeros(len(x)).double()
    for row in range(1, len(x)):
        along = (k[row] @ k[row - 1]) / (k[row] @ k[row]).clamp_min(1e-6)
        ratio = along * g[row].exp() * beta[row - 1] / beta[row].clamp_min(1e-6)
        target = x[row] + ratio.clamp(-2, 2) * error
        rounded[row] = target.to(dtype).double()
        error = target - rounded[row]
    return rounded


def state_error(found: Tensor, x: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> float:
    """What a column's errors add to the state after the chunk: root mean square of sum_i beta_i decay_i k_i e_ij."""
    G = g.double().cumsum(0)
    weighted = k.double() * (beta.double() * (G[-1] - G).exp())[:, None]
    return (weighted.T @ (found.double() - x)).square().mean().sqrt().item()
