"""Tensors as kernels take them: laid out so that no bit of a result depends on how an argument was."""

from __future__ import annotations

import torch
from torch import Tensor

# Triton compiles anew for addresses that are multiples of 16 bytes and for numbers that are multiples of 16, strides
# too, and lays tiles out by them: which thread holds which element, and so the order of a sum over a tile.
ALIGNMENT = 16


def packed(x: Tensor) -> Tensor:
    """`x` row-major from an aligned address, as an allocation is: itself or a copy."""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def rows_as_packed(x: Tensor) -> Tensor:
    """`[B, T, W]` rows that a kernel loads as those of `packed(x)`: itself, in any strides that allow it, or a copy.

    Copied are rows that are not unit-stride, that do not all begin at aligned addresses where dense rows do (W a
    multiple of 16), or that all do where dense rows do not: a value of 45 channels, padded to 48, was loaded in fours,
    and its scalars summed in another order.
    """
    batches, _, width = x.shape
    batch, row, step = x.stride()
    if batches == 1:
        batch = 0  # not read
    aligned = not (x.data_ptr() % ALIGNMENT or row % ALIGNMENT or batch % ALIGNMENT)
    same = aligned == (width % ALIGNMENT == 0) and (row == 1 or batch == 1) == (width == 1)
    if same and (step == 1 or width == 1):
        return x
    return x.clone(memory_format=torch.contiguous_format)
