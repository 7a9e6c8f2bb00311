"""PTX that kernels and lowerings share: one fp32 in, one fp32 out. Imports nothing, for Triton may be absent."""

ROUND_TO_BF16 = "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;"
"""fp32 rounded to BF16 and back: the packed conversion over a zero. It runs at the rate of a product, the single one
(F2F) on the unit of exp and reciprocal, at a quarter of it."""

SIGMOID = (
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; fma.rn.f32 t, t, 0f3E800000, 0f3E800000; "
    "rcp.approx.ftz.f32 t, t; mul.f32 $0, t, 0f3E800000; }"
)
"""1 / (1 + exp(-x)) as .25 / (.25 + .25 exp2(-log2(e) x)): a normal quotient where the sigmoid is none (x < -87.3).
Rounded to BF16 it is eager's for every BF16 code, to FP16 it is not."""

RECIPROCAL = "rcp.approx.ftz.f32 $0, $1;"
"""1 / x of a normal x to one unit in the last place, 0 where the result is subnormal."""
