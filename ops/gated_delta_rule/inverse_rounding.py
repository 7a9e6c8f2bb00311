"""Rounding of X to 16 bits where the keys of a chunk point one way, or against it.

Rounded number by number, each x_ij is off by e_ij of up to 2^-9 of itself, and a state of nearly equal keys gathers all
of them: it changes by sum_i beta_i k_i (sum_j e_ij beta_j E_j), a random walk of up to 64 steps that nothing damps
(keys of cosine .9975, beta 1: dbeta off by 4e-2). Here each number takes over what the one above lacks, as error
diffusion does in pictures,

    t_ij = x_ij + d_i e_(i-1)j,    e_ij = t_ij - round(t_ij),    d_i = (k_i k_(i-1)) / (k_i k_i) beta_(i-1) / beta_i,

so that a column's sum of beta_i k_i e_ij ends with the error of one number (dbeta off by 3e-3, what float32 arithmetic
on 16-bit tapes gives). A number is off by at most three such errors.

A chunk is rounded so when the mean |cosine| of its pairs of keys is above 1/2. Elsewhere errors have no one direction,
and carrying them changes nothing. On a GPU `prep` and `rounding_hopper` do the same with Gamma * X, where an error is
worth e^(g_i) less a row below: d_i has that factor.
"""

from __future__ import annotations

import torch

from .chunk_math import expand_heads, inverse_core

# A token of beta near 0 cannot make up for the one before it.
MOST = 2.0
SMALLEST = 1e-6


def alike(pairs: torch.Tensor) -> torch.Tensor:
    """Which chunks have their keys in one direction: `pairs` K K^T `[n, H, 64, 64]` -> bool `[n, H]`."""
    squares = pairs.diagonal(dim1=-2, dim2=-1)
    norms = (squares + 1e-6).rsqrt()
    cosines = (pairs.abs() * norms[..., :, None] * norms[..., None, :]).sum((-2, -1))
    keys = (squares > 0).sum(-1)
    return cosines - keys > 0.5 * keys * (keys - 1)


def round_carrying(x: torch.Tensor, pairs: torch.Tensor, beta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` `[m, 64, 64]` strictly lower, rounded as above; `pairs` `[m, 64, 64]`, `beta` `[m, 64]`."""
    along = pairs.diagonal(-1, -2, -1) / pairs.diagonal(0, -2, -1)[:, 1:].clamp_min(SMALLEST)
    carried = (along * beta[:, :-1] / beta[:, 1:].clamp_min(SMALLEST)).clamp_(-MOST, MOST)
    rounded = torch.zeros_like(x, dtype=dtype)
    error = x.new_zeros(len(x), x.shape[-1])
    for row in range(1, x.shape[-1]):
        target = x[:, row] + carried[:, row - 1, None] * error
        rounded[:, row] = target
        error = target - rounded[:, row]
    return rounded


def rounded_core(k: torch.Tensor, beta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """X in `dtype` `[n, HV, 64, 64]` from normalised k `[n, H, 64, K]` and beta `[n, HV, 64]`."""
    pairs = k @ k.mT
    x = inverse_core(pairs, beta)
    rounded = x.to(dtype)
    if dtype.itemsize > 2:
        return rounded
    chosen = alike(pairs)
    if chosen.any():
        heads = beta.shape[1]
        chosen = expand_heads(chosen[..., None], heads)[..., 0]
        rounded[chosen] = round_carrying(x[chosen], expand_heads(pairs, heads)[chosen], beta[chosen], dtype)
    return rounded
