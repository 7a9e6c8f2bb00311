"""What 16 bits take away from the rows of a state update goes into four of them, for the Hopper walks.

With equal keys and beta = 1 all rows of the update cancel but the last, and 64 roundings along one key add up to 3e-2
of dbeta. A second 16-bit term mends it for one more 64 x 128 x 64 product a chunk: .17 of .61 ms at 32,768 tokens and
48 heads. Here each thread adds what its 16 tokens lose to its last one before that is rounded: along equal keys the sum
is exact but for four roundings. Along other keys the moved rests are as large as those that stay: the rounding error of
the update grows by 1.4, of a gradient by 4 %. The update of the first 32 tokens, which keep theirs as it is, is under
way meanwhile.

A thread folds if no 1/norm among its tokens is above twice its last one's, for rests carry that factor: a zero key has
1e3. Where decays underflow it does not.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .device_hopper import split_terms

HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


def _held(eights: int) -> gl.constexpr:
    """[row, eight tokens, lane, pair] of an accumulator: a thread holds all of dimensions 1 and 3, of two rows."""
    registers = [[0, 0, 0, 1], [8, 0, 0, 0], *([0, 1 << bit, 0, 0] for bit in range(eights.bit_length() - 1))]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, warps, [], [64, eights, 4, 2]))


HELD = _held(4)
SUMS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(3, HELD.value)))
TOKENS = gl.constexpr(gl.SliceLayout(0, _held(8).value))


@gluon.jit
def halves(x):
    """The first and the last 32 tokens of [64, 64]; no thread hands anything over."""
    first, last = gl.split(gl.permute(gl.reshape(x, [64, 2, 32]), (0, 2, 1)))
    return gl.convert_layout(first, HALF, assert_trivial=True), gl.convert_layout(last, HALF, assert_trivial=True)


@gluon.jit
def held(x):
    return gl.convert_layout(gl.reshape(x, [64, 4, 4, 2]), HELD, assert_trivial=True)


@gluon.jit
def is_last(EIGHTS: gl.constexpr, ROWLESS: gl.constexpr):
    """[eights, 1, 2]: the last token of each thread. Registers alone decide, so the compiler knows."""
    eights = gl.arange(0, EIGHTS, gl.SliceLayout(1, gl.SliceLayout(2, ROWLESS)))[:, None, None]
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, ROWLESS)))[None, None, :]
    return (eights == EIGHTS - 1) & (pair == 1)


@gluon.jit
def may_fold(k_start, k_end):
    """[4]: whether the rests of a thread's tokens go into its last. k_start k_end = decay of the chunk / norm^2."""
    scale = gl.convert_layout(gl.reshape(k_start * k_end, [8, 4, 2]), TOKENS, assert_trivial=True)
    last = gl.sum(gl.sum(gl.where(is_last(8, TOKENS), scale, 0.0), axis=2), axis=0)
    largest = gl.max(gl.max(scale, axis=2), axis=0)
    return gl.convert_layout(largest < 4.0 * last, gl.SliceLayout(0, SUMS), assert_trivial=True)


@gluon.jit
def fold(update, rest, folds, dtype: gl.constexpr):
    """`update` of the last 32 tokens rounded; where a thread `folds`, its rests, with `rest` of the first 32, go into
    its last token."""
    high, own = split_terms(update, dtype)
    total = gl.where(folds[None, :], gl.sum(gl.sum(held(rest + own), axis=3), axis=1), 0.0)
    last = (held(update - own) + total[:, None, :, None]).to(dtype)
    low = gl.where(is_last(4, gl.SliceLayout(0, HELD))[None, :, :, :], last, held(high))
    return gl.convert_layout(gl.reshape(low, [64, 32]), HALF, assert_trivial=True)
