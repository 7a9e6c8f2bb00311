"""Device helpers shared by the PLE kernels, and the kernel that prepares weights and rows for both directions.

A walker program owns one channel tile and the rows `start, start + D, start + 2D, ...` of a span, D the dilation: the
taps of a row are then the rows it has just seen, kept in registers. All arithmetic on token results is written with
explicit `tl.fma` and the kernels are compiled without floating-point contraction, so a row's bits depend neither on its
place in a span nor on which unrolled copy of the loop body handles it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import MINUS_LOG2_E, reciprocal

# First row of the document of a row that belongs to none: never <= the row.
NO_DOCUMENT = tl.constexpr(2**31 - 1)
# How a walker receives a tensor: as it is, or viewed as int32 pairs of bf16 or fp16 elements.
PLAIN = tl.constexpr(0)
BF16_PAIRS = tl.constexpr(1)
FP16_PAIRS = tl.constexpr(2)
# The folded taps carry this factor, so a walker's sums are z = -log2(e) y and exp2 takes them as they are.
MINUS_EIGHTH_LN_2 = tl.constexpr(-0.6931471805599453 / 8)
MINUS_EIGHTH_LOG2_E = tl.constexpr(-1.4426950408889634 / 8)


@triton.jit
def _row_offset(row, tokens, stride_batch, stride_row, FLAT: tl.constexpr):
    """64-bit element offset of flattened row `row` of a [B, T, ...] tensor."""
    if FLAT:
        return row.to(tl.int64) * stride_row
    return (row // tokens).to(tl.int64) * stride_batch + (row % tokens).to(tl.int64) * stride_row


@triton.jit
def _channels(c, live, C: tl.constexpr):
    """Mask of the channels `c` of a row that is `live` or not (a scalar)."""
    return c < tl.where(live, C, 0)


@triton.jit
def _load_channels(
    x, offset, stream, tile, live, C: tl.constexpr, BC: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Channels `tile` of `stream` at `offset` (in elements of `x`), raw: int32 pairs of 16-bit elements unless PLAIN.

    Only 32-bit values stay packed while a loop carries them, and a pair unpacks in two instructions, not three.
    """
    per: tl.constexpr = 1 if KIND == PLAIN else 2
    c = tile * (BC // per) + tl.arange(0, BC // per)
    return tl.load(x + (stream * (C // per) + c) + offset, mask=_channels(c, live, C // per), other=0)


@triton.jit
def _unpack(raw, BC: tl.constexpr, KIND: tl.constexpr):
    """What `_load_channels` loaded, as fp32 [BC]."""
    if KIND == PLAIN:
        x = raw.to(tl.float32)
    elif KIND == BF16_PAIRS:
        even = (raw << 16).to(tl.float32, bitcast=True)
        odd = (raw & -65536).to(tl.float32, bitcast=True)
        x = tl.reshape(tl.join(even, odd), [BC])
    else:
        low = raw.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (raw >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x = tl.reshape(tl.join(low, high), [BC])
    return x


@triton.jit
def _unpack_tile(raw, BT: tl.constexpr, BC: tl.constexpr, KIND: tl.constexpr):
    """What a [BT, BC] tile was loaded as, as fp32."""
    per: tl.constexpr = 1 if KIND == PLAIN else 2
    return tl.reshape(_unpack(tl.reshape(raw, [BT * BC // per]), BT * BC, KIND), [BT, BC])


@triton.jit
def _sigmoid(y):
    """1 / (1 + exp(-y)) as rsqrt(1 + e)^2: two special-function instructions, no division, 0 and 1 at the ends."""
    root = tl.rsqrt(1.0 + tl.exp2(y * MINUS_LOG2_E))
    return root * root


@triton.jit
def _eight_sigmoids(z):
    """8 sigmoid(y) / -log2(e) of z = -log2(e) y: exp2, fma, reciprocal. 0 where exp2 overflows.

    An eighth of log2(e) (1 + exp(-y)) is below 2^126 for every finite exp(-y): the reciprocal of the whole is below the
    smallest normal number, so 0 on the hardware, from y = -87 on, where silu is -1.5e-36.
    """
    return reciprocal(tl.fma(tl.exp2(z), MINUS_EIGHTH_LOG2_E, MINUS_EIGHTH_LOG2_E))


@triton.jit
def _halves(x, BLOCK: tl.constexpr):
    """Even and odd elements: neighbours sit in one thread, so nothing moves."""
    return tl.split(tl.reshape(x, [BLOCK // 2, 2]))


@triton.jit
def _dot_eighths(x, y, BLOCK: tl.constexpr):
    """Products of each 8 neighbouring channels summed by fma: [BLOCK // 8], most of a row sum without a shuffle."""
    total = tl.zeros([BLOCK // 8], tl.float32)
    x0, x1 = _halves(x, BLOCK)
    y0, y1 = _halves(y, BLOCK)
    for half in tl.static_range(2):
        xh = x1 if half else x0
        yh = y1 if half else y0
        xa, xb = _halves(xh, BLOCK // 2)
        ya, yb = _halves(yh, BLOCK // 2)
        for quarter in tl.static_range(2):
            xq = xb if quarter else xa
            yq = yb if quarter else ya
            xe, xo = _halves(xq, BLOCK // 4)
            ye, yo = _halves(yq, BLOCK // 4)
            total = tl.fma(xo, yo, tl.fma(xe, ye, total))
    return total


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK: tl.constexpr):
    ring = ()
    for _ in tl.static_range(COUNT):
        ring = ring + (tl.zeros([BLOCK], tl.float32),)
    return ring


@triton.jit
def _same_document(ring, start, row, K: tl.constexpr, D: tl.constexpr, HAS_FIRST: tl.constexpr):
    """The rows of `ring` (oldest first, `row` last) that lie in the document of `row`, which begins at `start`.

    A select and not a product: a NaN of another document must not leak. Rows before 0 hold zeros already.
    """
    if not HAS_FIRST:
        return ring
    near = ()
    for j in tl.static_range(K - 1):
        near = near + (tl.where(start <= row - (K - 1 - j) * D, ring[j], 0.0),)
    return near + (ring[K - 1],)


@triton.jit
def _fold_tap(norm_w, tap):
    """The factor of a row in a walker's sum of z = -log2(e) y."""
    return (1.0 + norm_w) * tap * MINUS_LOG2_E


@triton.jit
def _taps(fold, stream, c, m_c, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The K folded taps -log2(e) (1 + w_c) w_j of a channel tile."""
    taps = ()
    for j in tl.static_range(K):
        taps = taps + (tl.load(fold + j * (N * C) + stream * C + c, mask=m_c, other=0.0),)
    return taps


@triton.jit
def _first_row(first, row, m_row, tokens, HAS_FIRST: tl.constexpr):
    """First row of the document that holds `row`."""
    if HAS_FIRST:
        return tl.load(first + row, mask=m_row, other=NO_DOCUMENT)
    return tl.where(m_row, row * 0, NO_DOCUMENT)


@triton.jit
def _fold_weights(key_w, query_w, conv_w, taps, fold, i_w, W: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """fold [K+1, W]: -log2(e) (1 + w_c) w_j for each tap, then (1 + w_q)(1 + w_k)."""
    w = i_w * BLOCK + tl.arange(0, BLOCK)
    m_w = w < W
    norm_w = tl.load(conv_w + w, mask=m_w, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        tap = tl.load(taps + w * K + j, mask=m_w, other=0.0).to(tl.float32)
        tl.store(fold + j * W + w, _fold_tap(norm_w, tap), mask=m_w)
    key = 1.0 + tl.load(key_w + w, mask=m_w, other=0.0).to(tl.float32)
    query = 1.0 + tl.load(query_w + w, mask=m_w, other=0.0).to(tl.float32)
    tl.store(fold + K * W + w, query * key, mask=m_w)


@triton.jit
def _find_documents(cu_seqlens, row, rows, documents, steps):
    """First row of the document of each `row`: binary search for the last boundary at or before it."""
    low = row * 0
    high = low + documents
    for _ in range(steps):
        middle = (low + high + 1) // 2
        boundary = tl.load(cu_seqlens + middle)
        low = tl.where(boundary <= row, middle, low)
        high = tl.where(boundary <= row, high, middle - 1)
    start = tl.load(cu_seqlens + low).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), rows)
    return tl.where(low < documents, start, NO_DOCUMENT).to(tl.int32)


@triton.jit
def _boundaries_are_bad(cu_seqlens, i_r, blocks, rows, documents, BLOCK: tl.constexpr):
    """1 if this program's share of `cu_seqlens` decreases, starts away from 0 or ends past the rows."""
    bad = tl.zeros([BLOCK], tl.int32)
    for base in range(i_r * BLOCK, documents + 1, blocks * BLOCK):
        i = base + tl.arange(0, BLOCK)
        here = tl.load(cu_seqlens + i, mask=i <= documents, other=0)
        after = tl.load(cu_seqlens + i + 1, mask=i < documents, other=2**31 - 1)
        wrong = (here > after) | (here > rows) | ((i == 0) & (here != 0))
        bad |= (wrong & (i <= documents)).to(tl.int32)
    return tl.max(bad, 0)


@triton.jit(do_not_specialize=["rows", "tokens", "documents", "steps", "blocks"])
def ple_prepare_kernel(
    key_w, query_w, conv_w, taps, fold, cu_seqlens, first, healthy, stats, mask, a, gated, rows, tokens, documents,
    steps, blocks, W: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FOLD_BLOCKS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_STATS: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Folds the weights; finds each row's document; in the backward also rebuilds a and gate*mask from `stats`."""
    pid = tl.program_id(0)
    if pid < FOLD_BLOCKS:
        _fold_weights(key_w, query_w, conv_w, taps, fold, pid, W, K, BLOCK)
    else:
        i_r = pid - FOLD_BLOCKS
        row = i_r * BLOCK + tl.arange(0, BLOCK)
        m_row = row < rows
        start = tl.where(m_row, row * 0, NO_DOCUMENT)
        if HAS_DOCUMENTS:
            start = _find_documents(cu_seqlens, row, rows, documents, steps)
            # Every offender writes the same 0.
            bad = _boundaries_are_bad(cu_seqlens, i_r, blocks, rows, documents, BLOCK)
            tl.store(healthy, 0, mask=bad > 0)
        elif HAS_FIRST:
            start = (row // tokens) * tokens
        if HAS_FIRST:
            tl.store(first + row, start, mask=m_row)
        if HAS_STATS:
            weight = (start <= row).to(tl.float32)
            if HAS_MASK:
                weight *= tl.load(mask + row, mask=m_row, other=0).to(tl.float32)
            plane = rows.to(tl.int64) * N
            for n in tl.static_range(N):
                at = row.to(tl.int64) * N + n
                gate = tl.load(stats + at, mask=m_row & (start <= row), other=0.0)
                rstd = tl.load(stats + 3 * plane + at, mask=m_row & (start <= row), other=0.0)
                tl.store(gated + at, gate * weight, mask=m_row)
                tl.store(a + at, gate * rstd * weight, mask=m_row)
