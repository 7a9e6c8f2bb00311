"""What 16 bits take away from the rows of a state update goes into four of them, for the Hopper walks.

With equal keys and beta = 1 all rows of the update cancel but the last, and 64 roundings along one key add up to 3e-2
of dbeta. A second 16-bit term mends it for one more 64 x 128 x 64 product a chunk: .17 of .61 ms at 32,768 tokens and
48 heads. Here each thread adds what its 16 tokens lose, here and as beta E in front of X, to its last one before that is
rounded: along equal keys the sum is exact but for four roundings, 4e-3 to 6e-3 of dbeta. Along other keys the moved
rests are as large as those that stay: the rounding error of the update grows by 1.4, of a gradient by 4 %.

A thread folds if no 1/norm among its tokens is above twice its last one's, for rests carry that factor: a zero key has
1e3. Where decays underflow it does not.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .device_hopper import NARROW, split_terms

# [row, eight tokens, lane, pair] of a 64 x 64 accumulator: a thread holds all of dimensions 1 and 3, of two rows.
HELD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]],
        [],
        [64, 8, 4, 2],
    )
)
ROWLESS = gl.constexpr(gl.SliceLayout(0, HELD.value))
SUMS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(3, HELD.value)))


@gluon.jit
def held(x):
    return gl.convert_layout(gl.reshape(x, [64, 8, 4, 2]), HELD, assert_trivial=True)


@gluon.jit
def is_last():
    """[8, 1, 2]: the last token of each thread. Registers alone decide, so the compiler knows."""
    eights = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, ROWLESS)))[:, None, None]
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, ROWLESS)))[None, None, :]
    return (eights == 7) & (pair == 1)


@gluon.jit
def may_fold(k_start, k_end):
    """[4]: whether the rests of a thread's tokens go into its last. k_start k_end = decay of the chunk / norm^2."""
    scale = gl.convert_layout(gl.reshape(k_start * k_end, [8, 4, 2]), ROWLESS, assert_trivial=True)
    last = gl.sum(gl.sum(gl.where(is_last(), scale, 0.0), axis=2), axis=0)
    largest = gl.max(gl.max(scale, axis=2), axis=0)
    return gl.convert_layout(largest < 4.0 * last, gl.SliceLayout(0, SUMS), assert_trivial=True)


@gluon.jit
def thread_sum(x):
    """[64, 4]: over the tokens of each thread, for each of its rows."""
    return gl.sum(gl.sum(held(x), axis=3), axis=1)


@gluon.jit
def fold(update, missed, folds, dtype: gl.constexpr):
    """`update` rounded; where a thread `folds`, its rests less `missed` (a thread_sum) are added to its last token."""
    high, rest = split_terms(update, dtype)
    rests = gl.where(folds[None, :], thread_sum(rest) - missed, 0.0)
    last = (held(update - rest) + rests[:, None, :, None]).to(dtype)
    low = gl.where(is_last()[None, :, :, :], last, held(high))
    return gl.convert_layout(gl.reshape(low, [64, 64]), NARROW, assert_trivial=True)
