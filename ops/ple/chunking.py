"""Token rows a PLE pass may hold at once, derived from its workspace budget.

Both formulas take Python ints, `SymInt`s or sympy expressions, so that a graph pass can put the same expression into a
graph with symbolic shapes.
"""

from __future__ import annotations

from typing import TypeVar

import sympy
import torch

DEFAULT_WORKSPACE_BYTES = 64 << 20

# [rows, N*C] buffers of the compute dtype alive at once (see reference.py and reference_backward.py).
FORWARD_BUFFERS = 3
BACKWARD_BUFFERS = 4
# [rows, N] scalars per row beside them, rounded up: stats, gate derivative, document edges.
_ROW_SCALARS = 24

Size = TypeVar("Size", int, torch.SymInt, sympy.Expr)


def _clamp(value: Size, low: int, high: Size) -> Size:
    if isinstance(value, sympy.Basic) or isinstance(high, sympy.Basic):
        return sympy.Max(low, sympy.Min(value, high))
    return torch.sym_max(low, torch.sym_min(value, high))


def useful_dilation(dilation: int, tokens: int) -> int:
    """A dilation that gives what `dilation` gives on `tokens` rows: a longer one reaches before the first row too.

    The halo and, on CUDA, the walks and their partial sums grow with it: 3,000,000 on 10 rows took 184 MiB. Up to 64,
    and then in powers of two, as a kernel is compiled for each value.
    """
    return min(dilation, 1 << max(tokens - 1, 63).bit_length())


def halo_rows(kernel: int, dilation: int) -> int:
    """Rows of history the dilated causal convolution reads before a token."""
    return (kernel - 1) * dilation


def forward_chunk_rows(
    workspace_bytes: int, tokens: Size, streams: int, channels: int, kernel: int, dilation: int, itemsize: int = 4
) -> Size:
    """Rows per chunk of the forward: at least one, at most `tokens`, else what the budget holds.

    Args:
        workspace_bytes: budget in bytes for everything that grows with the chunk or with N*C.
        tokens: T.
        streams, channels: N and C.
        kernel, dilation: of the convolution, whose halo is (kernel-1)*dilation rows of `value`.
        itemsize: bytes of the compute dtype.
    """
    width = streams * channels
    halo = halo_rows(kernel, dilation)
    fixed = width * (4 + kernel) + halo * (channels + 2 * streams)
    per_row = FORWARD_BUFFERS * width + channels + _ROW_SCALARS * streams
    return _clamp((workspace_bytes // itemsize - fixed) // per_row, 1, tokens)


def backward_chunk_rows(
    workspace_bytes: int, tokens: Size, streams: int, channels: int, kernel: int, dilation: int, itemsize: int = 4
) -> Size:
    """Rows per chunk of the backward; arguments as `forward_chunk_rows`.

    Beside the chunk the backward carries a halo of d(conv output) rows, N*C wide, from the chunk after it, and one
    accumulator per weight.
    """
    width = streams * channels
    halo = halo_rows(kernel, dilation)
    fixed = width * (10 + 2 * kernel + 2 * halo) + halo * (channels + 2 * streams)
    per_row = BACKWARD_BUFFERS * width + channels + _ROW_SCALARS * streams
    return _clamp((workspace_bytes // itemsize - fixed) // per_row, 1, tokens)
