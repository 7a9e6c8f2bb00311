"""Device helpers shared by the gated delta rule kernels: where a chunk lies, masked tiles, decay masks."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 64


@triton.jit
def locate_chunk(chunk, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN: tl.constexpr):
    """First token (int64, over the flattened batch) and valid rows of a chunk, found without the host.

    Packed: the last document whose first chunk is <= `chunk` holds it, since empty documents repeat an offset.
    """
    if VARLEN:
        low = 0
        high = documents
        while high - low > 1:
            middle = (low + high) // 2
            before = tl.load(offsets_ptr + middle) <= chunk
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        first = tl.load(offsets_ptr + low).to(tl.int64)
        start = tl.load(cu_ptr + low).to(tl.int64) + (chunk - first) * 64
        rows = tl.minimum(tl.load(cu_ptr + low + 1).to(tl.int64) - start, 64).to(tl.int32)
    else:
        row = chunk // chunks_per_row
        inner = (chunk - row * chunks_per_row) * 64
        start = row.to(tl.int64) * T + inner
        rows = tl.minimum(T - inner, 64).to(tl.int32)
    return start, rows


@triton.jit
def locate_document(document, cu_ptr, offsets_ptr, T, chunks_per_row, VARLEN: tl.constexpr):
    """First token (int64), length and first chunk of a document."""
    if VARLEN:
        start = tl.load(cu_ptr + document).to(tl.int64)
        length = (tl.load(cu_ptr + document + 1).to(tl.int64) - start).to(tl.int32)
        first = tl.load(offsets_ptr + document).to(tl.int64)
    else:
        start = document.to(tl.int64) * T
        length = T
        first = document.to(tl.int64) * chunks_per_row
    return start, length, first


@triton.jit
def locate_piece(piece, table_ptr):
    """A row of the table of pieces (see pieces.py): first token, length, first chunk, document, pieces of the document
    before it and after it, both -1 where the slot holds none."""
    row = table_ptr + piece * 8
    length = tl.load(row + 1).to(tl.int32)
    before, after = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    return tl.load(row), length, tl.load(row + 2), tl.load(row + 3).to(tl.int32), before, after


@triton.jit
def load_rows(ptr, stride: tl.constexpr, rows, columns, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Tile [rows, columns] of a row-major matrix; rows past `valid` and columns past WIDTH read 0."""
    if BLOCK == WIDTH:
        tile = tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=(rows < valid)[:, None], other=0.0)
    else:
        mask = (rows < valid)[:, None] & (columns < WIDTH)[None, :]
        tile = tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
def store_rows(ptr, tile, stride: tl.constexpr, rows, columns, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    mask = (rows < valid)[:, None]
    if BLOCK != WIDTH:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(ptr + rows[:, None] * stride + columns[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_decay(ptr, stride: tl.constexpr, rows, valid):
    """Chunk-local cumulative log decay and its last valid value; padding rows carry the last value."""
    last = tl.load(ptr + (valid - 1) * stride)
    decay = tl.load(ptr + rows * stride, mask=rows < valid, other=0.0)
    return tl.where(rows < valid, decay, last), last


@triton.jit
def gate_sums(ptr, stride: tl.constexpr, rows, valid):
    """`load_decay`'s sums again, from the gates themselves, in two fp32 terms: high, which is the tape, and low.

    A difference of two sums has the error of its own size then, not of theirs: (high - high) + (low - low).
    """
    g = tl.load(ptr + rows * stride, mask=rows < valid, other=0.0)
    total = tl.cumsum(tl.where(g < -88.0, -88.0, g).to(tl.float64), 0)
    high = total.to(tl.float32)
    return high, (total - high.to(tl.float64)).to(tl.float32)


@triton.jit
def load_state(ptr, rows, columns, K: tl.constexpr, V: tl.constexpr):
    mask = (rows < K)[:, None] & (columns < V)[None, :]
    return tl.load(ptr + rows[:, None] * V + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_state(ptr, state, rows, columns, K: tl.constexpr, V: tl.constexpr):
    mask = (rows < K)[:, None] & (columns < V)[None, :]
    tl.store(ptr + rows[:, None] * V + columns[None, :], state.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_turned(ptr, rows, columns, K: tl.constexpr, V: tl.constexpr):
    """A state that was kept as [V, K], see `forward_hopper`."""
    mask = (rows < K)[:, None] & (columns < V)[None, :]
    return tl.load(ptr + rows[:, None] + columns[None, :] * K, mask=mask, other=0.0)


@triton.jit
def store_turned(ptr, state, rows, columns, K: tl.constexpr, V: tl.constexpr):
    mask = (rows < K)[:, None] & (columns < V)[None, :]
    tl.store(ptr + rows[:, None] + columns[None, :] * K, state, mask=mask)
