"""Tapes: what the forward keeps for the backward, by save mode, with their shapes.

| tape   | shape             | dtype | kept by     |
|--------|-------------------|-------|-------------|
| gcum   | [B, T, HV]        | fp32  | light, full |
| k_rstd | [B, T, H]         | fp32  | light, full |
| qscale | [B, T, H]         | fp32  | light, full |
| x      | [B, T, HV, 64]    | q's   | light, full |
| h      | [NC_max, HV, K, V]| q's   | full        |
| delta  | [B, T, HV, V]     | q's   | full        |
| starts | [S HV V K]        | fp32  | light       |

`starts`, which travels in the place of h and has one axis, holds the states, each as [V, K], from which a backward in
spans replays h: that in front of every 32nd chunk of a document (`spans.py`). S = B T // 2048 + 1.
A tape that is not kept is an empty tensor of shape (0,). NC_max = B * ceil(T / 64), or T // 64 + N with `cu_seqlens`:
a bound, so that no shape depends on the values of `cu_seqlens`. float64 inputs keep float64 tapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..varlen import CHUNK
from .spans import start_count

SAVE_MODES = ("none", "light", "full")
LIGHT = ("gcum", "k_rstd", "qscale", "x")
FULL = (*LIGHT, "h", "delta")
KEPT = {"none": (), "light": (*LIGHT, "starts"), "full": FULL}


class Tapes(NamedTuple):
    """The six tapes in schema order; an empty tensor stands for one that is missing, start states for a missing h."""

    gcum: torch.Tensor
    k_rstd: torch.Tensor
    qscale: torch.Tensor
    x: torch.Tensor
    h: torch.Tensor
    delta: torch.Tensor

    def missing(self) -> tuple[str, ...]:
        return tuple(name for name, tape in zip(self._fields, self, strict=True) if tape.dim() == 1)


def state_dtype(q: torch.Tensor) -> torch.dtype:
    """Arithmetic, states and fp32 tapes: float32, or float64 for float64 inputs (CPU only)."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def document_count(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def chunk_bound(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """NC_max: rows of the h tape."""
    if cu_seqlens is None:
        return q.shape[0] * ((q.shape[1] + CHUNK - 1) // CHUNK)
    return q.shape[1] // CHUNK + cu_seqlens.shape[0] - 1


def tape_shapes(q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> dict[str, tuple]:
    """Shape of each tape when kept, by name."""
    batch, tokens, heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    return {
        "gcum": (batch, tokens, value_heads),
        "k_rstd": (batch, tokens, heads),
        "qscale": (batch, tokens, heads),
        "x": (batch, tokens, value_heads, CHUNK),
        "h": (chunk_bound(q, cu_seqlens), value_heads, key_width, value_width),
        "delta": (batch, tokens, value_heads, value_width),
        "starts": (start_count(batch * tokens) * value_heads * key_width * value_width,),
    }


def tape_dtype(name: str, q: torch.Tensor) -> torch.dtype:
    return state_dtype(q) if name in ("gcum", "k_rstd", "qscale", "starts") else q.dtype


def new_tapes(q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, names: tuple[str, ...]) -> Tapes:
    """Zero tapes for `names` (rows of no document stay zero), empty ones for the rest. Serves the fake too."""
    shapes = tape_shapes(q, v, cu_seqlens)

    def new(name: str) -> torch.Tensor:
        name = "starts" if name == "h" and "starts" in names else name
        return q.new_zeros(shapes[name] if name in names else (0,), dtype=tape_dtype(name, q))

    return Tapes(*map(new, Tapes._fields))
