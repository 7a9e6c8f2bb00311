"""Packed documents: `cu_seqlens`, its checks and the metadata made from it once per step."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .validation import check_dtype, check_rank, check_tensor

CHUNK = 64
INDEX_DTYPES = (torch.int32, torch.int64)


class Packing(NamedTuple):
    """Metadata of one packed batch, made by `prepare_varlen`; accepted wherever `cu_seqlens` is.

    Attributes:
        cu_seqlens: `[N + 1]`, contiguous, the caller's dtype and device: document n is rows
            `cu_seqlens[n]:cu_seqlens[n + 1]`.
        chunk_offsets: `[N + 1]`, same dtype and device: number of 64-row chunks before document n. The chunk grid
            restarts at every document, so document n owns chunks `chunk_offsets[n]:chunk_offsets[n + 1]`.
    """

    cu_seqlens: torch.Tensor
    chunk_offsets: torch.Tensor


def prepare_varlen(cu_seqlens: torch.Tensor) -> Packing:
    """Builds the metadata of a packed batch once, to be shared by every layer of a step.

    Args:
        cu_seqlens: `[N + 1]` int32 or int64, CPU or CUDA, any stride: 0 followed by the ends of the N documents, never
            decreasing (equal neighbours are an empty document). Rows after the last entry belong to no document.

    Returns:
        A `Packing`. Results with it are bitwise those of passing `cu_seqlens` itself.

    Raises:
        TypeError: not a tensor, a DTensor, or not int32/int64.
        ValueError: not one-dimensional, empty, not starting at 0 or decreasing. Values are read on the CPU only; on
            CUDA a bad value trips a device-side assert, without a synchronisation. Inside `torch.compile` the values
            are left to the ops that receive the result; a fake tensor has none.
    """
    if isinstance(cu_seqlens, Packing):
        return cu_seqlens
    check_tensor("cu_seqlens", cu_seqlens)
    check_index_vector("cu_seqlens", cu_seqlens)
    if not (torch.compiler.is_compiling() or isinstance(cu_seqlens, FakeTensor)):
        if cu_seqlens.device.type == "cpu":
            read_boundaries(cu_seqlens)
        else:
            steps_back = (cu_seqlens[1:] < cu_seqlens[:-1]).any()
            torch._assert_async(~steps_back & (cu_seqlens[0] == 0), "cu_seqlens must start at 0 and never decrease")
    cu_seqlens = cu_seqlens.contiguous()
    return Packing(cu_seqlens, chunk_offsets_of(cu_seqlens))


def chunk_offsets_of(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """`[N + 1]` exclusive cumulative sum of ceil(length / 64), in the dtype of `cu_seqlens`; no host read."""
    # Not (length + 63) / 64, which passes 2^31 in int32 where the length is near it.
    chunks = (cu_seqlens.diff() - 1).div(CHUNK, rounding_mode="floor") + 1
    return torch.nn.functional.pad(chunks.cumsum(0, dtype=cu_seqlens.dtype), (1, 0))


def unpack_cu_seqlens(
    cu_seqlens: torch.Tensor | Packing | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Splits what a front received into `(cu_seqlens, chunk_offsets)`; a bare tensor has no chunk offsets yet."""
    if cu_seqlens is None:
        return None, None
    if isinstance(cu_seqlens, Packing):
        check_tensor("cu_seqlens.cu_seqlens", cu_seqlens.cu_seqlens)
        check_tensor("cu_seqlens.chunk_offsets", cu_seqlens.chunk_offsets)
        return cu_seqlens.cu_seqlens, cu_seqlens.chunk_offsets
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(
            f"cu_seqlens: expected a torch.Tensor or the Packing of prepare_varlen, got {type(cu_seqlens).__name__}"
        )
    check_tensor("cu_seqlens", cu_seqlens)
    return cu_seqlens, None


def check_index_vector(name: str, value: torch.Tensor) -> None:
    """Rank, dtype and size of `cu_seqlens` or `chunk_offsets`."""
    check_rank(name, value, 1, "[N + 1]")
    check_dtype(name, value, INDEX_DTYPES)
    if value.shape[0] < 1:
        raise ValueError(f"{name}: expected [N + 1] entries, the first one 0, got shape {tuple(value.shape)}")


def check_packing(
    batch: int,
    device: torch.device,
    cu_seqlens: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None = None,
) -> None:
    """What can be told without reading values; called from an op's implementation and its fake alike.

    Args:
        batch: rows B of the op's input `[B, T, ...]`, which `cu_seqlens` requires to be 1.
        device: that of the op's inputs; `cu_seqlens` lies there or on the CPU.
    """
    if cu_seqlens is None:
        if chunk_offsets is not None:
            raise ValueError("chunk_offsets: expected None without cu_seqlens, got a tensor")
        return
    check_index_vector("cu_seqlens", cu_seqlens)
    if batch != 1:
        raise ValueError(f"cu_seqlens: expected inputs with batch size 1 (documents packed in one row), got {batch}")
    _check_packing_device("cu_seqlens", cu_seqlens, device)
    if chunk_offsets is None:
        return
    check_index_vector("chunk_offsets", chunk_offsets)
    _check_packing_device("chunk_offsets", chunk_offsets, device)
    if chunk_offsets.shape[0] != cu_seqlens.shape[0]:
        raise ValueError(
            f"chunk_offsets: expected {cu_seqlens.shape[0]} entries as in cu_seqlens, got {chunk_offsets.shape[0]}"
        )


def _check_packing_device(name: str, value: torch.Tensor, device: torch.device) -> None:
    if value.device.type != "cpu" and value.device != device:
        expected = "cpu" if device.type == "cpu" else f"cpu or {device}"
        raise ValueError(f"{name}: expected device {expected} (that of the inputs), got {value.device}")


# Boundaries already read and checked, newest first: (int64 copy, chunk offsets, host values). Compared by content, so a
# tensor changed in place is never mistaken for what it was; 16 layers times forward and backward read the host once.
_READ: deque[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = deque(maxlen=8)


def read_boundaries(
    cu_seqlens: torch.Tensor, tokens: int | None = None, chunk_offsets: torch.Tensor | None = None
) -> tuple[int, ...]:
    """Values of `cu_seqlens` on the host, checked. Synchronises if the tensor is on a GPU: reference paths only.

    Args:
        tokens: T of the op's input, which no document may pass; None checks the vector on its own.
        chunk_offsets: must be the offsets that `prepare_varlen` gives for these boundaries.

    Raises:
        ValueError: not starting at 0, decreasing, ending past `tokens`, another packing's `chunk_offsets`, or a tensor
            on the meta device, which has no values.
    """
    if cu_seqlens.is_meta:
        raise ValueError("cu_seqlens: expected a tensor with values, got one on the meta device")
    content = cu_seqlens.detach().to("cpu", torch.int64)
    known = next((entry for entry in list(_READ) if torch.equal(entry[0], content)), None)
    if known is None:
        values = tuple(content.tolist())
        if values[0] != 0:
            raise ValueError(f"cu_seqlens: expected the first entry to be 0, got {values[0]}")
        for n, (start, end) in enumerate(pairwise(values)):
            if end < start:
                raise ValueError(f"cu_seqlens: expected non-decreasing entries, got {start} then {end} at index {n}")
        known = (content.clone(), chunk_offsets_of(content), values)
        _READ.appendleft(known)
    _, offsets, values = known
    if tokens is not None and values[-1] > tokens:
        raise ValueError(f"cu_seqlens: expected the last entry to be at most T = {tokens}, got {values[-1]}")
    if chunk_offsets is not None and not torch.equal(offsets, chunk_offsets.detach().to("cpu", torch.int64)):
        raise ValueError(
            "chunk_offsets: expected the exclusive cumulative sum of ceil(length / 64) that prepare_varlen makes from "
            "this cu_seqlens, got other values (metadata of another batch or chunk size)"
        )
    return values
