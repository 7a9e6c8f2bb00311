"""One `[B, T, W]` tensor in layouts that differ in what Triton can know of its addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _inside(x: Tensor, batch_gap: int = 0, row_gap: int = 0, gap: int = 0, first: int = 0) -> Tensor:
    """`x` from element `first` of a larger buffer, with so many unused elements behind each row, row block and x."""
    batch, tokens, width = x.shape
    row = width + gap
    block = (tokens + row_gap) * row + batch_gap
    buffer = torch.full((first + batch * block,), float("nan"), dtype=x.dtype, device=x.device)
    return buffer.as_strided(x.shape, (block, row, 1), first).copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows_padded_to_16": lambda x: _inside(x, gap=-x.shape[2] % 16 or 16),
    "rows_padded_by_8": lambda x: _inside(x, gap=8),
    "rows_padded_by_2": lambda x: _inside(x, gap=2),
    "rows_padded_by_1": lambda x: _inside(x, gap=1),
    "begins_at_element_1": lambda x: _inside(x, first=1),
    "begins_at_element_2_rows_padded_to_16": lambda x: _inside(x, gap=-x.shape[2] % 16, first=2),
    "batch_rows_padded": lambda x: _inside(x, row_gap=3),
    "batch_rows_padded_by_1_element": lambda x: _inside(x, batch_gap=1),
    "tokens_before_batch": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels_before_tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every_second_channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
"""None of them changes a value."""
