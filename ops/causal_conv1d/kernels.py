"""Triton kernels of the short causal convolution: programs that each walk a span of rows in one tile of channels.

A walker takes R rows at a time and keeps the K-1 rows before them in registers, so each row is read once. A span is
walked document by document, and rows outside the document are never loaded: they read 0 without a select per tap, and
a NaN cannot leak. Sums over taps run from the newest tap to the oldest by explicit `tl.fma`, and the kernels are
compiled without floating-point contraction: a row's bits depend neither on its place in a span nor on the documents
around it. `row` counts B*T rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..ple.kernels_common import _boundaries_are_bad, _channels, _row_offset
from ..triton_rounding import rounded, silu, widened

# What the documents are: all rows, the rows of each batch element, or as `cu_seqlens` says.
ONE_DOCUMENT = tl.constexpr(0)
BATCH_ROWS = tl.constexpr(1)
PACKED = tl.constexpr(2)


@triton.jit(do_not_specialize=["rows", "documents"])
def check_kernel(cu_seqlens, healthy, rows, documents, BLOCK: tl.constexpr):
    """`healthy` = 1, or 0 if `cu_seqlens` decreases, starts away from 0 or ends past the rows. One program."""
    tl.store(healthy, 1 - _boundaries_are_bad(cu_seqlens, 0, 1, rows, documents, BLOCK))


@triton.jit
def _document(cu_seqlens, row, guess, rows, tokens, documents, steps, DOCUMENTS: tl.constexpr):
    """First row of the document of `row`, the row after its last, its number: `guess`, or as a search finds it.

    Within [0, rows] whatever `cu_seqlens` holds.
    """
    if DOCUMENTS == PACKED:
        low = tl.maximum(tl.minimum(guess, documents - 1), 0)
        found = (tl.load(cu_seqlens + low) <= row) & (tl.load(cu_seqlens + low + 1) > row)
        high = tl.where(found, low, documents - 1)
        low = tl.where(found, low, 0)
        for _ in range(tl.where(found, 0, steps)):
            middle = (low + high + 1) // 2
            after = tl.load(cu_seqlens + middle) <= row
            low = tl.where(after, middle, low)
            high = tl.where(after, high, middle - 1)
        first = tl.maximum(tl.load(cu_seqlens + low).to(tl.int32), 0)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + low + 1).to(tl.int32), row + 1), rows)
        return first, end, low
    elif DOCUMENTS == BATCH_ROWS:
        first = row - row % tokens
        return first, first + tokens, guess
    else:
        return row * 0, rows, guess


@triton.jit
def _packed_rows(cu_seqlens, rows, documents, DOCUMENTS: tl.constexpr):
    """Rows that belong to a document; those after them do not."""
    total = rows
    if DOCUMENTS == PACKED:
        total = tl.minimum(tl.maximum(tl.load(cu_seqlens + documents).to(tl.int32), 0), rows)
    return total


@triton.jit
def _load_rows(
    x, row, first, end, tokens, x_batch, x_row, c, COUNT: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows row, ..., row + COUNT - 1 as fp32, rounded to DTYPE first; 0 outside [first, end)."""
    out = ()
    for i in tl.static_range(COUNT):
        live = (row + i >= first) & (row + i < end)
        offset = _row_offset(row + i, tokens, x_batch, x_row, FLAT)
        tile = tl.load(x + c + offset, mask=_channels(c, live, D), other=0.0)
        out = out + (tile.to(DTYPE).to(tl.float32),)
    return out


@triton.jit
def _load_inner_rows(
    x, row, tokens, x_batch, x_row, c, COUNT: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr,
    DENSE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """As `_load_rows`, all of one document: one offset, and of DENSE tensors constant distances between the rows."""
    out = ()
    at = x + c + _row_offset(row, tokens, x_batch, x_row, FLAT)
    if DENSE:
        at = x + c + row.to(tl.int64) * D
    for i in tl.static_range(COUNT):
        distance = i * x_row.to(tl.int64)
        if DENSE:
            distance = i * D
        if D % BC == 0:
            tile = tl.load(at + distance)
        else:
            tile = tl.load(at + distance, mask=c < D, other=0.0)
        out = out + (widened(tile, DTYPE),)
    return out


@triton.jit
def _load_taps(weight, healthy, c, D: tl.constexpr, K: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The K taps of a channel tile, NaN if the boundaries are bad: so is then everything computed from them."""
    taps = ()
    for j in tl.static_range(K):
        tap = tl.load(weight + c.to(tl.int64) * K + j, mask=c < D, other=0.0).to(tl.float32)
        if DOCUMENTS == PACKED:
            tap = tl.where(tl.load(healthy) != 0, tap, float("nan"))
        taps = taps + (tap,)
    return taps


@triton.jit
def _load_bias(bias, c, D: tl.constexpr, BC: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        return tl.load(bias + c, mask=c < D, other=0.0).to(tl.float32)
    return tl.zeros([BC], tl.float32)


@triton.jit
def _convolve(window, taps, bias, i: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Sum over taps in row K - 1 + i of `window`, rounded to DTYPE."""
    y = taps[K - 1] * window[i + K - 1]
    for shift in tl.static_range(1, K):
        y = tl.fma(window[i + K - 1 - shift], taps[K - 1 - shift], y)
    if HAS_BIAS:
        y += bias
    return rounded(y, DTYPE)


@triton.jit
def _tail(window, COUNT: tl.constexpr, R: tl.constexpr):
    """The last COUNT of COUNT + R rows."""
    out = ()
    for j in tl.static_range(COUNT):
        out = out + (window[R + j],)
    return out


@triton.jit
def _zero_rows(out, row, stop, c, D: tl.constexpr, BC: tl.constexpr):
    """Writes 0 to rows row, ..., stop - 1."""
    for step in range(stop - row):
        at = (row + step).to(tl.int64) * D
        tl.store(out + c + at, tl.zeros([BC], tl.float32).to(out.dtype.element_ty), mask=c < D)


@triton.jit
def _walk(
    x, y, taps, bias, row, first, end, tokens, c, x_batch, x_row, D: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    FLAT: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows row, ..., end - 1 of one document, which begins at `first`."""
    ring = _load_rows(x, row - (K - 1), first, end, tokens, x_batch, x_row, c, K - 1, D, FLAT, DTYPE)
    for step in range(0, end - row, R):
        at = row + step
        window = ring + _load_rows(x, at, first, end, tokens, x_batch, x_row, c, R, D, FLAT, DTYPE)
        for i in tl.static_range(R):
            out = _convolve(window, taps, bias, i, K, HAS_BIAS, DTYPE)
            if SILU:
                out = silu(out)
            offset = (at + i).to(tl.int64) * D
            tl.store(y + c + offset, out.to(DTYPE).to(y.dtype.element_ty), mask=_channels(c, at + i < end, D))
        ring = _tail(window, K - 1, R)


@triton.jit(do_not_specialize=["rows", "tokens", "span", "documents", "steps"])
def forward_kernel(
    x, weight, bias, cu_seqlens, healthy, y, rows, tokens, span, documents, steps, x_batch, x_row,
    D: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr, DOCUMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """y = act(bias + sum over taps) of one span of rows and BC channels."""
    TILES: tl.constexpr = (D + BC - 1) // BC
    DTYPE: tl.constexpr = weight.dtype.element_ty
    pid = tl.program_id(0)
    c = (pid % TILES) * BC + tl.arange(0, BC)
    row = (pid // TILES) * span
    stop = tl.minimum(row + span, rows)
    taps = _load_taps(weight, healthy, c, D, K, DOCUMENTS)
    offset = _load_bias(bias, c, D, BC, HAS_BIAS)
    total = tl.minimum(_packed_rows(cu_seqlens, rows, documents, DOCUMENTS), stop)
    document = row * 0
    while row < total:
        first, after, document = _document(cu_seqlens, row, document, rows, tokens, documents, steps, DOCUMENTS)
        end = tl.minimum(after, total)
        _walk(x, y, taps, offset, row, first, end, tokens, c, x_batch, x_row, D, K, R, FLAT, HAS_BIAS, SILU, DTYPE)
        row = end
        document += 1
    if DOCUMENTS == PACKED:
        _zero_rows(y, row, stop, c, D, BC)
