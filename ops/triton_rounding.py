"""Rounding, reciprocals and sigmoids of Triton kernels, in the instructions that run at full rate on NVIDIA GPUs."""

from __future__ import annotations

import triton
import triton.language as tl

from . import ptx

# The interpreter runs no inline PTX.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
ROUND_TO_BF16 = tl.constexpr(ptx.ROUND_TO_BF16)
RECIPROCAL = tl.constexpr(ptx.RECIPROCAL)
UNPACK_PAIR_BF16 = tl.constexpr(ptx.UNPACK_PAIR_BF16)
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
LEAST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 rounded to DTYPE and back."""
    if (tl.bfloat16 == DTYPE) & (not INTERPRETED):
        return tl.inline_asm_elementwise(ROUND_TO_BF16, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def reciprocal(x):
    """1 / x of a normal x to one unit in the last place, 0 where it is subnormal: `1 / x` takes seven instructions."""
    if INTERPRETED:
        return tl.where(tl.abs(1.0 / x) < LEAST_NORMAL, 0.0, 1.0 / x)
    return tl.inline_asm_elementwise(RECIPROCAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _four_sigmoids(y):
    """1 / (.25 (1 + exp(-y))): of at most 2^126 where exp(-y) is finite, so this is normal. That of 1 + exp(-y) is
    6e-39 at y = -88 and would be 0; the bits are the same otherwise, times 4."""
    return reciprocal(tl.fma(tl.exp2(y * MINUS_LOG2_E), 0.25, 0.25))


@triton.jit
def sigmoid(y):
    return 0.25 * _four_sigmoids(y)


@triton.jit
def silu(y):
    return y * 0.25 * _four_sigmoids(y)


@triton.jit
def widened(x, DTYPE: tl.constexpr):
    """fp32 of x rounded to DTYPE; a BF16 tile needs an even number of elements a thread."""
    if (x.dtype == tl.bfloat16) & (tl.bfloat16 == DTYPE) & (not INTERPRETED):
        return tl.inline_asm_elementwise(UNPACK_PAIR_BF16, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    return x.to(DTYPE).to(tl.float32)
