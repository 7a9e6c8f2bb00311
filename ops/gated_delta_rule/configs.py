"""Every launch configuration of the gated delta rule kernels, pinned: nothing is tuned at run time.

Tuning at run time would break the bitwise classes (kept = replayed, packed = alone) and cost the first call minutes.
A shape class is (operand bytes, padded K); V splits into blocks of BV columns.
Not usable: 16-bit walks with BV = 32 and one stage, which Triton 3.6 compiles for sm_90 into shared-memory reads out of
range (seen by compute-sanitizer in `adjoint_kernel` and `forward_kernel`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

SM_COUNT = 132  # multiprocessors of an H200. Fixed: neither bits nor bytes of a call follow the card.


class PrepConfig(NamedTuple):
    """BLOCK columns of k are loaded at a time."""

    BLOCK: int
    num_warps: int


class ScanConfig(NamedTuple):
    BV: int
    num_warps: int
    num_stages: int


class GradientConfig(NamedTuple):
    BV: int
    num_warps: int
    num_stages: int


class Configs(NamedTuple):
    prep: PrepConfig
    scan: ScanConfig
    gradient: GradientConfig


#            (operand bytes, padded K)  prep                scan                 gradient
TABLE: dict[tuple[int, int], Configs] = {
    (2, 16): Configs(PrepConfig(16, 2), ScanConfig(64, 4, 2), GradientConfig(64, 8, 1)),
    (2, 32): Configs(PrepConfig(32, 2), ScanConfig(64, 4, 2), GradientConfig(64, 8, 1)),
    (2, 64): Configs(PrepConfig(64, 2), ScanConfig(64, 4, 2), GradientConfig(64, 8, 1)),
    (2, 128): Configs(PrepConfig(64, 1), ScanConfig(64, 4, 3), GradientConfig(64, 8, 2)),
    (2, 256): Configs(PrepConfig(64, 1), ScanConfig(32, 4, 2), GradientConfig(32, 8, 2)),
    (4, 16): Configs(PrepConfig(16, 1), ScanConfig(32, 4, 1), GradientConfig(32, 8, 1)),
    (4, 32): Configs(PrepConfig(32, 1), ScanConfig(32, 4, 1), GradientConfig(32, 8, 1)),
    (4, 64): Configs(PrepConfig(32, 1), ScanConfig(32, 4, 1), GradientConfig(32, 8, 1)),
    (4, 128): Configs(PrepConfig(32, 1), ScanConfig(32, 4, 1), GradientConfig(32, 8, 1)),
    (4, 256): Configs(PrepConfig(32, 1), ScanConfig(16, 4, 1), GradientConfig(16, 8, 1)),
}


class SpanConfig(NamedTuple):
    """How the backward is cut into spans, see `spans.py`.

    leg: chunks between two states that the forward keeps in save_mode "light": 3 MB at 48 heads.
    alone_bytes: what h, dh, delta, scores and row table of all chunks may take in one span.
    span_bytes: past that there are two spans, or as many as keep each of them below this.
    """

    leg: int
    alone_bytes: int
    span_bytes: int


# At (16, 48), K = V = 128, bf16, 72 chunks are one span and 288 the most in a span. Each costs a round of launches
# and two fills of the walks' pipelines: at 32,768 tokens 8 take .3 ms longer than 2 (2,596 MiB at the peak for 3,399).
SPANS = SpanConfig(leg=32, alone_bytes=320 << 20, span_bytes=1280 << 20)


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def block_width(width: int) -> int:
    """Head widths are padded to a power of two, at least 16: the smallest a tensor-core product takes."""
    return max(16, next_power_of_two(width))


@functools.cache
def select(itemsize: int, K: int, V: int) -> Configs:
    configs = TABLE[itemsize, block_width(K)]
    widest = block_width(V)
    return configs._replace(
        scan=configs.scan._replace(BV=min(configs.scan.BV, widest)),
        gradient=configs.gradient._replace(BV=min(configs.gradient.BV, widest)),
    )


# Minor releases of Triton whose Gluon walks have run on an H200 and were right; under others the plain walks run.
HOPPER_WALKS_TRITON = ((3, 6),)


def walks_for_hopper(
    itemsize: int, K: int, V: int, table_floats: int, capability: tuple[int, int], triton: tuple[int, int]
) -> bool:
    """True where `hopper_walks.py` walks, False where `scan.py` does: 16-bit operands with K = V = 128 on sm_90.

    The copy engine takes 32-bit coordinates, of which those of the row table, `table_floats` long, are the largest.
    """
    fits = itemsize == 2 and K == V == 128 and table_floats < 2**31
    return fits and capability == (9, 0) and triton in HOPPER_WALKS_TRITON


# A document of more than L chunks is walked in pieces of L, for the chains that it brings (value heads x blocks of V):
# at most 16, or at most 34, beyond which two documents fill half the multiprocessors. L follows from heads, widths and
# dtype alone, never from the pack, so a document has the same bits packed and alone. It is a multiple of SPANS.leg.
#        most chains, L
CUTS = ((16, 64), (34, 256))
# What decays by e^-FAINT over the last chunks of a piece is nothing to its end state: fp32 ends, in normal numbers, at
# 1.2e-38, and this is 4e-44.
FAINT = 100.0
# 16-bit terms in which the Hopper map kernel takes M, beta E and the update: two hold 16 bits of fp32's 24.
MAP_TERMS = 2


def settings() -> tuple[object, ...]:
    """What tests and benchmarks change here: records of calls are told apart by it."""
    return SPANS, CUTS, FAINT, MAP_TERMS


def piece_length(rows: int, itemsize: int, HV: int, K: int, V: int) -> int | None:
    """L, in chunks: length of the pieces that documents of up to `rows` tokens are walked in; None: they are whole."""
    if block_width(K) > 128 or itemsize > 4:  # a map of 256 x 256 does not fit the fold; float64 is the CPU's
        return None
    chains = HV * -(-V // select(itemsize, K, V).scan.BV)
    length = next((length for most, length in CUTS if chains <= most), None)
    return length if length is not None and rows > 64 * length else None


def operands_for_hopper(itemsize: int, K: int, capability: tuple[int, int], triton: tuple[int, int]) -> bool:
    """True where `operands_hopper.py` makes tapes, row table and P, False where `prep.py` and `scores.py` do."""
    return itemsize == 2 and K == 128 and capability == (9, 0) and triton in HOPPER_WALKS_TRITON
