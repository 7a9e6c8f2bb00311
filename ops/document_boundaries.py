"""`document_boundaries`: per-token document marks of a packed row -> `cu_seqlens`, without a data-dependent shape.

How many documents a mark tensor holds is data, and shapes must not depend on data (no device sync, no recompile). So
the result has room for `document_capacity(tokens)` documents and is filled up with empty ones, which every op accepts.
"""

from __future__ import annotations

import torch

from .register import register_op
from .validation import check_rank

# "seq_idx": the document number of each token, a new document wherever it changes.
# "position_ids": a new document wherever a position is not its predecessor plus one (transformers' own rule).
KINDS = ("seq_idx", "position_ids")

# A GDN launch has room for tokens // 64 + documents chunks: tokens // 64 documents double it, 256 more are nothing.
TOKENS_PER_DOCUMENT = 64
ALWAYS_ROOM_FOR = 256


def document_capacity(tokens: int) -> int:
    """How many documents `document_boundaries` finds room for in `tokens` tokens (an int or a SymInt)."""
    return tokens // TOKENS_PER_DOCUMENT + ALWAYS_ROOM_FOR


def _check(index: torch.Tensor, kind: str) -> None:
    check_rank("index", index, 2, "[B,T]")
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(f"index: expected an integer dtype, got {str(index.dtype).removeprefix('torch.')}")
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(map(repr, KINDS))}, got {kind!r}")


def _document_boundaries(index: torch.Tensor, *, kind: str) -> torch.Tensor:
    _check(index, kind)
    tokens = index.numel()
    step = 1 if kind == "position_ids" else 0
    starts = torch.ones(index.shape, dtype=torch.bool, device=index.device)
    torch.ne(index[:, 1:], index[:, :-1] + step, out=starts[:, 1:])
    starts = starts.reshape(-1)
    capacity = document_capacity(tokens)
    count = starts.sum()
    message = (
        f"packed rows hold more than the {capacity} documents that {kind} of {tokens} tokens has room for; "
        "pass cu_seq_lens_q (DataCollatorWithFlattening(return_flash_attn_kwargs=True)), which has no limit"
    )
    if index.device.type == "cpu":
        if int(count) > capacity:
            raise ValueError(f"{kind}: {message} (got {int(count)})")
    elif index.device.type == "cuda":
        torch._assert_async(count <= capacity, message)
    # Slot `capacity + 1` takes the tokens that start nothing.
    slot = torch.where(starts, starts.cumsum(0) - 1, capacity + 1).clamp_max(capacity + 1)
    bounds = torch.full((capacity + 2,), tokens, dtype=torch.int32, device=index.device)
    positions = torch.arange(tokens, dtype=torch.int32, device=index.device)
    bounds.scatter_(0, slot, positions)
    return bounds[: capacity + 1].clone()


def _fake(index: torch.Tensor, *, kind: str) -> torch.Tensor:
    _check(index, kind)
    return index.new_empty((document_capacity(index.numel()) + 1,), dtype=torch.int32)


document_boundaries_op = register_op("document_boundaries", _document_boundaries, _fake)
