"""Rounding and reciprocals of Triton kernels, in the instructions that run at full rate on NVIDIA GPUs."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter runs no inline PTX.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 rounded to DTYPE and back.

    BF16: the packed conversion over a zero is the rounded fp32, at the rate of a product; the single one (F2F) runs on
    the unit of exp and reciprocal, at a quarter of it.
    """
    if (tl.bfloat16 == DTYPE) & (not INTERPRETED):
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def reciprocal(x):
    """1 / x of a normal x to one unit in the last place, 0 where it is subnormal: `1 / x` takes seven instructions."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
