"""Triton kernels of the gated residual for eager calls on CUDA, each a whole chain of eager ops with their roundings.

Compiled without floating-point contraction: every fused multiply-add that eager's kernels contain is written out.
exp and division are the accurate ones (`libdevice.exp`, `tl.div_rn`), as in eager, where Triton's own move results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .. import ptx
from ..triton_rounding import INTERPRETED, rounded

SIGMOID = tl.constexpr(ptx.SIGMOID)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + libdevice.exp(-x))


@triton.jit
def _gate(x, DTYPE: tl.constexpr):
    """sigmoid rounded to DTYPE. BF16 is too coarse to show exp2 and reciprocal as the hardware gives them (0 of 65,536
    codes)."""
    if (tl.bfloat16 == DTYPE) & (not INTERPRETED):
        y = tl.inline_asm_elementwise(SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return rounded(y, DTYPE)
    return rounded(_sigmoid(x), DTYPE)


@triton.jit
def down_kernel(x, y, size, reciprocal, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < size
    scaled = rounded(tl.load(x + i, mask=m, other=0.0).to(tl.float32) * reciprocal, x.dtype.element_ty)
    tl.store(y + i, tl.div_rn(scaled, 1.0 + libdevice.exp(-scaled)), mask=m)


@triton.jit
def down_backward_kernel(dy, x, dx, size, reciprocal, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < size
    dtype: tl.constexpr = x.dtype.element_ty
    scaled = rounded(tl.load(x + i, mask=m, other=0.0).to(tl.float32) * reciprocal, dtype)
    gate = _sigmoid(scaled)
    d = tl.load(dy + i, mask=m, other=0.0).to(tl.float32) * gate * tl.fma(scaled, 1.0 - gate, 1.0)
    tl.store(dx + i, rounded(d, dtype) * reciprocal, mask=m)


@triton.jit
def mix_kernel(up, normed, y, width, reciprocal, N: tl.constexpr, BLOCK: tl.constexpr):
    """Mean over streams. ATen sums stream n into accumulator n mod 4, each from 0, then adds the four in order."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = c < width
    dtype: tl.constexpr = y.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(4):
        part = tl.zeros([BLOCK], tl.float32)
        for n in tl.static_range(first, N, 4):
            i = (row * N + n) * width + c
            gate = _gate(tl.load(up + i, mask=m, other=0.0).to(tl.float32), up.dtype.element_ty)
            part += rounded(gate * tl.load(normed + i, mask=m, other=0.0).to(tl.float32), dtype)
        total = part if first == 0 else total + part
    tl.store(y + row * width + c, total * reciprocal, mask=m)


@triton.jit
def mix_backward_kernel(dy, up, normed, dup, dnormed, width, reciprocal, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = c < width
    dtype: tl.constexpr = dy.dtype.element_ty
    gate_dtype: tl.constexpr = up.dtype.element_ty
    d = rounded(tl.load(dy + row * width + c, mask=m, other=0.0).to(tl.float32) * reciprocal, dtype)
    for n in tl.static_range(N):
        i = (row * N + n) * width + c
        gate = _gate(tl.load(up + i, mask=m, other=0.0).to(tl.float32), gate_dtype)
        dgate = rounded(rounded(d * tl.load(normed + i, mask=m, other=0.0).to(tl.float32), dtype), gate_dtype)
        # sigmoid_backward computes in the 16-bit type on CUDA: each step rounds.
        slope = rounded(dgate * rounded(1.0 - gate, gate_dtype), gate_dtype)
        tl.store(dup + i, slope * gate, mask=m)
        tl.store(dnormed + i, rounded(d * gate, dtype), mask=m)


@triton.jit
def inject_kernel(
    hidden, hyper, weights, y, width, N: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = c < width
    h = tl.load(hidden + row * width + c, mask=m, other=0.0).to(tl.float32)
    for n in tl.static_range(N):
        i = (row * N + n) * width + c
        product = rounded(h * tl.load(weights + row * N + n).to(tl.float32), PRODUCT)
        tl.store(y + i, tl.load(hyper + i, mask=m, other=0.0).to(tl.float32) + product, mask=m)


@triton.jit
def inject_backward_kernel(
    dy, hidden, weights, dhidden, dweights, width, N: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row a program. The second reading of dy comes from L1: a row of 4 x 2560 BF16 is 20 KB."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        c = start + tl.arange(0, BLOCK)
        m = c < width
        total = tl.zeros([BLOCK], tl.float32)
        for first in tl.static_range(4):
            part = tl.zeros([BLOCK], tl.float32)
            for n in tl.static_range(first, N, 4):
                d = rounded(tl.load(dy + (row * N + n) * width + c, mask=m, other=0.0).to(tl.float32), PRODUCT)
                part += rounded(d * tl.load(weights + row * N + n).to(tl.float32), PRODUCT)
            total = part if first == 0 else total + part
        tl.store(dhidden + row * width + c, rounded(total, PRODUCT), mask=m)
    for n in tl.static_range(N):
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            c = start + tl.arange(0, BLOCK)
            m = c < width
            d = rounded(tl.load(dy + (row * N + n) * width + c, mask=m, other=0.0).to(tl.float32), PRODUCT)
            h = tl.load(hidden + row * width + c, mask=m, other=0.0).to(tl.float32)
            sums += rounded(d * h, PRODUCT)
        tl.store(dweights + row * N + n, rounded(tl.sum(sums, 0), PRODUCT))
