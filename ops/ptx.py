"""PTX that kernels and lowerings share: fp32 in, fp32 out. Imports nothing, for Triton may be absent."""

ROUND_TO_BF16 = "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;"
"""fp32 rounded to BF16 and back: the packed conversion over a zero. It runs at the rate of a product, the single one
(F2F) on the unit of exp and reciprocal, at a quarter of it."""

SPLIT_PAIR_BF16 = (
    "{ .reg .f32 a, b; cvt.rn.bf16x2.f32 $2, $4, $3; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; "
    "sub.rn.f32 $0, $3, a; sub.rn.f32 $1, $4, b; }"
)
"""Of two fp32: what rounding to BF16 takes away, exact, and the rounded ones as a packed pair. Constraints
"=&f,=&f,=&r,f,f"."""

SPLIT_PAIR_FP16 = (
    "{ .reg .b16 low, high; .reg .f32 a, b; cvt.rn.f16x2.f32 $2, $4, $3; mov.b32 {low, high}, $2; "
    "cvt.f32.f16 a, low; cvt.f32.f16 b, high; sub.rn.f32 $0, $3, a; sub.rn.f32 $1, $4, b; }"
)

ROUND_PAIR_BF16 = "cvt.rn.bf16x2.f32 $2, $4, $3; shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
"""Of two fp32: what they are rounded to, as fp32 and as a packed pair. Constraints as SPLIT_PAIR_BF16."""

ROUND_PAIR_FP16 = (
    "{ .reg .b16 low, high; cvt.rn.f16x2.f32 $2, $4, $3; mov.b32 {low, high}, $2; "
    "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)

SIGMOID = (
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; fma.rn.f32 t, t, 0f3E800000, 0f3E800000; "
    "rcp.approx.ftz.f32 t, t; mul.f32 $0, t, 0f3E800000; }"
)
"""1 / (1 + exp(-x)) as .25 / (.25 + .25 exp2(-log2(e) x)): a normal quotient where the sigmoid is none (x < -87.3).
Rounded to BF16 it is eager's for every BF16 code, to FP16 it is not."""

RECIPROCAL = "rcp.approx.ftz.f32 $0, $1;"
"""1 / x of a normal x to one unit in the last place, 0 where the result is subnormal."""

UNPACK_PAIR_BF16 = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
"""A packed pair of BF16 as two fp32, in two instructions: PTX's own conversion takes three. Constraints "=f,=f,r"."""
