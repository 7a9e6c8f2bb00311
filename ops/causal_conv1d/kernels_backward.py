"""Triton kernels of the convolution's backward: one walk for dx and partial weight sums, one sum of the partials.

With g the gradient before the activation, dx[t] = sum_s weight[K - 1 - s] g[t + s] is known once row t + K - 1 has
been seen, so a walk writes dx K - 1 rows behind the row it reads, and reads K - 1 rows past its span.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import rounded, sigmoid
from .kernels import (
    PACKED,
    _channels,
    _convolve,
    _document,
    _load_bias,
    _load_inner_rows,
    _load_rows,
    _load_taps,
    _packed_rows,
    _tail,
    _zero_rows,
)

# Rows at a time at the end of a document or a span, where rows may be missing.
EDGE_ROWS = tl.constexpr(4)


@triton.jit
def _zeros(COUNT: tl.constexpr, BC: tl.constexpr):
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (tl.zeros([BC], tl.float32),)
    return out


@triton.jit
def _before_activation(
    dy, window, taps, bias, i: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """g, rounded to DTYPE, of row K - 1 + i of `window` from its dy."""
    if SILU:
        y = _convolve(window, taps, bias, i, K, HAS_BIAS, DTYPE)
        share = sigmoid(y)
        return rounded(dy * share * tl.fma(y, 1.0 - share, 1.0), DTYPE)
    return dy


@triton.jit
def _add_weight_gradients(sums, window, g, i: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr):
    """sums[j] + g[row] x[row - (K - 1 - j)], sums[K] + g[row], for row K - 1 + i of `window`."""
    out = ()
    for j in tl.static_range(K):
        out = out + (tl.fma(g, window[i + j], sums[j]),)
    if HAS_BIAS:
        out = out + (sums[K] + g,)
    return out


@triton.jit
def _input_gradient(grads, taps, i: tl.constexpr, K: tl.constexpr):
    """dx of row i of `grads`."""
    dx = taps[K - 1] * grads[i]
    for shift in tl.static_range(1, K):
        dx = tl.fma(grads[i + shift], taps[K - 1 - shift], dx)
    return dx


@triton.jit
def _store_row(dx, t, out, live, c, D: tl.constexpr):
    tl.store(dx + c + t.to(tl.int64) * D, out.to(dx.dtype.element_ty), mask=_channels(c, live, D))


@triton.jit
def _store_last_rows(
    dx, grads, taps, t, row, end, c, D: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, DTYPE: tl.constexpr
):
    """dx of rows t, ..., t + K - 2, those in [row, end), where the document has no row from t + K - 1 on."""
    grads = grads + _zeros(K - 1, BC)
    for i in tl.static_range(K - 1):
        out = _input_gradient(grads, taps, i, K).to(DTYPE)
        _store_row(dx, t + i, out, (t + i >= row) & (t + i < end), c, D)


@triton.jit
def _inner_rows(
    dy, x, dx, taps, bias, sums, ring, grads, row, at, tokens, c, dy_batch, dy_row, x_batch, x_row, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr, DENSE: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """R rows from `at` on, all of one document and one span: no mask but that no row before `row` is stored."""
    dys = _load_inner_rows(dy, at, tokens, dy_batch, dy_row, c, R, D, BC, FLAT, DENSE, DTYPE)
    window = ring + _load_inner_rows(x, at, tokens, x_batch, x_row, c, R, D, BC, FLAT, DENSE, DTYPE)
    to = dx + c + (at - (K - 1)).to(tl.int64) * D
    for i in tl.static_range(R):
        g = _before_activation(dys[i], window, taps, bias, i, K, HAS_BIAS, SILU, DTYPE)
        sums = _add_weight_gradients(sums, window, g, i, K, HAS_BIAS)
        grads = grads + (g,)
        out = _input_gradient(grads, taps, i, K).to(DTYPE).to(dx.dtype.element_ty)
        if (i >= K - 1) & (D % BC == 0):
            tl.store(to + i * D, out)
        else:
            tl.store(to + i * D, out, mask=_channels(c, at + i - (K - 1) >= row, D))
    return sums, _tail(window, K - 1, R), _tail(grads, K - 1, R)


@triton.jit
def _walk(
    dy, x, dx, taps, bias, sums, row, end, first, after, tokens, c, dy_batch, dy_row, x_batch, x_row,
    D: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr, DENSE: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows row, ..., end - 1 of the document [first, after): stores dx, returns `sums` with their share added.

    Rows past the document have g = 0, so its last dx follow without them; those of a span need K - 1 rows of the next.
    """
    E: tl.constexpr = min(R, EDGE_ROWS)
    ring = _load_rows(x, row - (K - 1), first, after, tokens, x_batch, x_row, c, K - 1, D, FLAT, DTYPE)
    grads = _zeros(K - 1, BC)
    inner = (end - row) // R * R
    for step in range(0, inner, R):
        sums, ring, grads = _inner_rows(
            dy, x, dx, taps, bias, sums, ring, grads, row, row + step, tokens, c, dy_batch, dy_row, x_batch, x_row,
            D, K, R, BC, FLAT, DENSE, HAS_BIAS, SILU, DTYPE,
        )  # fmt: skip
    at = row + inner
    stop = tl.minimum(end + K - 1, after)
    while at < stop:
        dys = _load_rows(dy, at, first, after, tokens, dy_batch, dy_row, c, E, D, FLAT, DTYPE)
        window = ring + _load_rows(x, at, first, after, tokens, x_batch, x_row, c, E, D, FLAT, DTYPE)
        for i in tl.static_range(E):
            g = _before_activation(dys[i], window, taps, bias, i, K, HAS_BIAS, SILU, DTYPE)
            # Rows past `end` are the next span's to add. Rows past `after` have dy = 0 and change no dx.
            sums = _add_weight_gradients(sums, window, tl.where(at + i < end, g, 0.0), i, K, HAS_BIAS)
            grads = grads + (g,)
            t = at + i - (K - 1)
            out = _input_gradient(grads, taps, i, K).to(DTYPE)
            _store_row(dx, t, out, (t >= row) & (t < end), c, D)
        ring = _tail(window, K - 1, E)
        grads = _tail(grads, K - 1, E)
        at += E
    if at - (K - 1) < end:
        _store_last_rows(dx, grads, taps, at - (K - 1), row, end, c, D, K, BC, DTYPE)
    return sums


@triton.jit(do_not_specialize=["rows", "tokens", "span", "documents", "steps"])
def backward_kernel(
    dy, x, weight, bias, cu_seqlens, healthy, dx, partial, rows, tokens, span, documents, steps, dy_batch, dy_row,
    x_batch, x_row, D: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr,
    DENSE: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """dx of one span of rows, and `partial` [spans, K + HAS_BIAS, D], its sums for dweight and dbias."""
    TILES: tl.constexpr = (D + BC - 1) // BC
    DTYPE: tl.constexpr = weight.dtype.element_ty
    pid = tl.program_id(0)
    c = (pid % TILES) * BC + tl.arange(0, BC)
    i_span = pid // TILES
    row = i_span * span
    stop = tl.minimum(row + span, rows)
    taps = _load_taps(weight, healthy, c, D, K, DOCUMENTS)
    offset = _load_bias(bias, c, D, BC, HAS_BIAS)
    sums = _zeros(K + HAS_BIAS, BC)
    total = tl.minimum(_packed_rows(cu_seqlens, rows, documents, DOCUMENTS), stop)
    document = row * 0
    while row < total:
        first, after, document = _document(cu_seqlens, row, document, rows, tokens, documents, steps, DOCUMENTS)
        end = tl.minimum(after, total)
        sums = _walk(
            dy, x, dx, taps, offset, sums, row, end, first, after, tokens, c, dy_batch, dy_row, x_batch, x_row,
            D, K, R, BC, FLAT, DENSE, HAS_BIAS, SILU, DTYPE,
        )  # fmt: skip
        row = end
        document += 1
    if DOCUMENTS == PACKED:
        _zero_rows(dx, row, stop, c, D, BC)
    out = partial + i_span.to(tl.int64) * ((K + HAS_BIAS) * D) + c
    for j in tl.static_range(K + HAS_BIAS):
        tl.store(out + j * D, sums[j], mask=c < D)


@triton.jit(do_not_specialize=["spans"])
def weight_kernel(
    partial, healthy, dweight, dbias, spans, D: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    CHECKED: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of `partial` over its spans in a fixed order, rounded once; NaN if the boundaries are bad."""
    j = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_c = c < D
    total = tl.zeros([BS, BLOCK], tl.float32)
    for first in range(0, spans, BS):
        i_span = first + tl.arange(0, BS)
        at = (i_span.to(tl.int64) * (K + HAS_BIAS) + j) * D
        total += tl.load(partial + at[:, None] + c[None, :], mask=(i_span < spans)[:, None] & m_c[None, :], other=0.0)
    out = tl.sum(total, 0)
    if CHECKED:
        out = tl.where(tl.load(healthy) != 0, out, float("nan"))
    if j < K:
        tl.store(dweight + c.to(tl.int64) * K + j, out.to(dweight.dtype.element_ty), mask=m_c)
    elif HAS_BIAS:
        tl.store(dbias + c, out.to(dbias.dtype.element_ty), mask=m_c)
