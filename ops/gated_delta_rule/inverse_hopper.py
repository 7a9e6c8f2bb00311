"""Strictly lower inverse of up to four value heads at once, in Gluon.

X solves x_r = -(l_r + sum_{i<r} l_ri beta_i x_i), L = stril(K^ K^T) in 16x16 blocks. Diagonal blocks by substitution in
fp32: a thread holds one column of a block for two heads, so that no step waits for another lane and the 15 steps of
all heads and blocks run side by side. Then one warp to a head: the six blocks below, column by column from the right,

    R_rc = L_rc + X_rr D_r L_rc + sum_{c<J<r} X_rJ D_J L_Jc,    X_rc = -(R_rc + R_rc D_c X_cc),

which keeps every computed factor on the left: an accumulator holds, register by register, the operand that a product
with k_width 2 takes, so nothing computed crosses lanes. Products are three TF32 terms (2^-21).
"""

# ruff: noqa: RUF005 (Triton's frontend takes no starred tuples)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


def keep(layout: object, rank: int, *dims: int) -> object:
    """The layout of a tensor that has only `dims` of `layout`'s dimensions."""
    for dim in reversed(range(rank)):
        layout = layout if dim in dims else gl.SliceLayout(dim, layout)
    return layout


# Triton after 3.6 renamed it.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

# [head, row, column] of one block: a product's accumulator and operands.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
# [head, block, column, row]: the substitution, one warp to a block, whose factors serve two heads in a thread.
COLUMN = gl.constexpr(gl.BlockedLayout([1, 1, 1, 16], [2, 1, 16, 1], [1, 4, 1, 1], [3, 2, 1, 0]))
ROW = gl.constexpr(keep(COLUMN.value, 4, 0, 1, 2))
OWN = gl.constexpr(keep(COLUMN.value, 4, 1, 2))
FACTORS = gl.constexpr(keep(COLUMN.value, 4, 1, 3))
HEAD_FACTORS = gl.constexpr(keep(COLUMN.value, 4, 0, 1, 3))
HEAD_BLOCK = gl.constexpr(keep(COLUMN.value, 4, 0, 1))
BLOCK = gl.constexpr(keep(COLUMN.value, 4, 1))
# The same block as it is stored, 32 bytes of a row by four lanes: neighbours have exchanged two columns for two.
OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0]],
        [[0, 0, 8], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 16, 16],
    )
)
OUT_HEAD = gl.constexpr(keep(OUT.value, 3, 0))
OUT_ROW = gl.constexpr(keep(OUT.value, 3, 1))
OUT_COLUMN = gl.constexpr(keep(OUT.value, 3, 2))

# Rows of 64 bytes, swizzled so that eight rows of an operand or accumulator meet every bank once.
FP32_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 2, [1, 0]))
FP32_TILES = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 2, [2, 1, 0]))
FP32_HEADS = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 2, [3, 2, 1, 0]))
PLAIN_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN_3D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def exp(x):
    """e^x to 2 ulp of 2^x, 0 below 2^-126; gl.exp spends three instructions more on results between 2^-149 and that."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _pick(values, i: gl.constexpr):
    """Column i of a tensor whose last dimension lies in registers: folds to those registers."""
    index = gl.arange(0, 16, gl.SliceLayout(0, FACTORS))
    bits = gl.where((index == i)[None, :], values.to(gl.int32, bitcast=True), 0)
    return gl.convert_layout(gl.reduce_or(bits, 1).to(gl.float32, bitcast=True), BLOCK)


@gluon.jit
def _pick_by_head(values, i: gl.constexpr):
    index = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, HEAD_FACTORS)))
    bits = gl.where((index == i)[None, None, :], values.to(gl.int32, bitcast=True), 0)
    return gl.convert_layout(gl.reduce_or(bits, 2).to(gl.float32, bitcast=True), HEAD_BLOCK)


@gluon.jit
def _join_halves(xs, HALF: gl.constexpr):
    joined = ()
    for r in gl.static_range(HALF):
        joined = joined + (gl.join(xs[r], xs[r + HALF]),)
    return joined


@gluon.jit
def solve_diagonals(diagonals, betas):
    """The diagonal blocks of X, as [block, head, row, column]."""
    whole = reinterpret(betas, gl.float32, [4, 4, 16], PLAIN_3D)
    beta = whole.permute((1, 0, 2)).load(HEAD_FACTORS)
    xs = ()
    ys = ()
    for r in gl.static_range(16):
        row = diagonals.index(r).load(OWN)[None, :, :]
        if r == 0:
            total = gl.zeros([4, 4, 16], gl.float32, ROW) + row
        else:
            factors = diagonals.index(r).load(FACTORS)
            total = ys[0] * _pick(factors, 0)[None, :, None] + row
            for i in gl.static_range(1, r):
                total = total + ys[i] * _pick(factors, i)[None, :, None]
        xs = xs + (-total,)
        ys = ys + (total * -_pick_by_head(beta, r)[:, :, None],)
    stacked = _join_halves(_join_halves(_join_halves(_join_halves(xs, 8), 4), 2), 1)[0]
    return gl.permute(gl.reshape(stacked, [4, 4, 16, 16]), (1, 0, 3, 2))


@gluon.jit
def _upper(x):
    """The leading bits that a TF32 product reads, so that x - upper(x) is exact."""
    return (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)


@gluon.jit
def _multiply(left, high, low, total):
    left_high = _upper(left)
    left_low = left - left_high
    total = mma_v2(left_low, high, total, input_precision="tf32")
    total = mma_v2(left_high, low, total, input_precision="tf32")
    return mma_v2(left_high, high, total, input_precision="tf32")


@gluon.jit
def _store(ptr, block, count, valid, HV: gl.constexpr, ROW_BLOCK: gl.constexpr, COLUMN_BLOCK: gl.constexpr):
    head = gl.arange(0, 4, OUT_HEAD)[:, None, None]
    row = ROW_BLOCK * 16 + gl.arange(0, 16, OUT_ROW)[None, :, None]
    column = gl.arange(0, 16, OUT_COLUMN)[None, None, :]
    inside = (row < valid) & (head < count) & (column < 16)
    gl.store(ptr + row * (HV * 64) + head * 64 + (COLUMN_BLOCK * 16 + column), block, mask=inside)


@gluon.jit
def _gate_and_store(
    target, x, gates, count, valid, HV: gl.constexpr, ROW_BLOCK: gl.constexpr, COLUMN_BLOCK: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Gamma * X of one block: rounded once to memory, or as it is to shared memory [block, row, head, column].

    The difference of a diagonal block's upper half may overflow exp."""
    G_row = gates.index(ROW_BLOCK).load(gl.SliceLayout(2, MMA))
    G_column = gates.index(COLUMN_BLOCK).load(gl.SliceLayout(1, MMA))
    gated = x * exp(G_row[:, :, None] - G_column[:, None, :])
    if ROW_BLOCK == COLUMN_BLOCK:
        rows = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
        columns = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
        gated = gl.where(rows[None, :, None] > columns[None, None, :], gated, 0.0)
    if SHARED:
        tile = reinterpret(target, gl.float32, [16, 16, 4, 16], PLAIN_3D)
        tile.index(ROW_BLOCK * 4 + COLUMN_BLOCK).permute((1, 0, 2)).store(gated)
    else:
        gated = gl.convert_layout(gated.to(target.dtype.element_ty), OUT)
        _store(target, gated, count, valid, HV, ROW_BLOCK, COLUMN_BLOCK)


@gluon.jit
def _diagonal(solved, betas, J: gl.constexpr, none):
    """X_JJ D_J, loaded for each product: `none` is 0, but the compiler, which would keep it, does not know."""
    beta = betas.index(J + none).load(gl.SliceLayout(1, LEFT))
    return solved.index(J + none).load(LEFT) * beta[:, None, :]


@gluon.jit
def merge_blocks(
    target, solved, blocks, gates, betas, count, valid, HV: gl.constexpr, SHARED: gl.constexpr = False
):  # fmt: skip
    """Every block of Gamma X to memory: in shared memory they would leave room for three CTAs, not four. SHARED: there,
    in fp32, but for what is right of the diagonal blocks."""
    solved = reinterpret(solved, gl.float32, [4, 4, 16, 16], FP32_TILES)
    # lefts[r][n]: X_rJ D_J for J = r - 1 - n.
    lefts = ((), (), (), ())
    for c in gl.static_range(2, -1, -1):
        beta_row = betas.index(c).load(gl.SliceLayout(2, RIGHT))
        beta_column = betas.index(c).load(gl.SliceLayout(1, MMA))
        inverse = solved.index(c).load(RIGHT) * beta_row[:, :, None]
        inverse_high = _upper(inverse)
        inverse_low = inverse - inverse_high
        totals = ()
        for r in gl.static_range(c + 1, 4):
            block = blocks.index(r * 4 + c).load(gl.SliceLayout(0, MMA))
            totals = totals + (gl.expand_dims(block, 0).broadcast_to([4, 16, 16]),)
        for J in gl.static_range(c + 1, 4):
            block = blocks.index(J * 4 + c).load(gl.SliceLayout(0, RIGHT))
            high = _upper(block)
            low = gl.expand_dims(block - high, 0).broadcast_to([4, 16, 16])
            high = gl.expand_dims(high, 0).broadcast_to([4, 16, 16])
            updated = ()
            for r in gl.static_range(c + 1, 4):
                if r == J:
                    left = _diagonal(solved, betas, J, valid >> (9 - c))
                    updated = updated + (_multiply(left, high, low, totals[r - c - 1]),)
                elif r > J:
                    updated = updated + (_multiply(lefts[r][r - J - 1], high, low, totals[r - c - 1]),)
                else:
                    updated = updated + (totals[r - c - 1],)
            totals = updated
        grown = ()
        for r in gl.static_range(4):
            if r > c:
                R = totals[r - c - 1]
                x = -_multiply(gl.convert_layout(R, LEFT), inverse_high, inverse_low, R)
                _gate_and_store(target, x, gates, count, valid, HV, r, c, SHARED)
                grown = grown + (lefts[r] + (gl.convert_layout(x * beta_column[:, None, :], LEFT),),)
            else:
                grown = grown + (lefts[r],)
        lefts = grown
    for r in gl.static_range(4):
        _gate_and_store(target, solved.index(r).load(MMA), gates, count, valid, HV, r, r, SHARED)
        if not SHARED:
            for c in gl.static_range(r + 1, 4):
                _store(target, gl.zeros([4, 16, 16], target.dtype.element_ty, OUT), count, valid, HV, r, c)
