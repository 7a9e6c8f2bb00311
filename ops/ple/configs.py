"""Launch configurations of the PLE kernels: one table per element size, nothing is tuned at run time."""

from __future__ import annotations

from typing import NamedTuple

# Rows a walk covers at least: the K-1 rows walked twice at each end of a span cost 4 % there (kernel 4, dilation 3).
MINIMUM_SPAN = 240


class Walk(NamedTuple):
    """A kernel whose programs each take `block` channels of a span of rows; about `spans` of them."""

    block: int
    warps: int
    spans: int
    unroll: int = 1


class Tile(NamedTuple):
    """A kernel whose programs take [rows, block] tiles; `spans` programs along the rows where it accumulates."""

    rows: int
    block: int
    warps: int
    spans: int = 0


class Config(NamedTuple):
    scalars: Tile
    output: Walk
    conv: Walk
    value: Walk
    score: Tile
    # Register bounds of the token gradient kernel, without and with documents or residual: they set how many of its
    # one-warp programs share a multiprocessor (12 and 11). Below them the compiler spills.
    token_registers: tuple[int, int] = (168, 184)


# 16-byte accesses per thread; four streams of 4 channels per thread in `value`, 8 channels of one stream in the others.
# One warp per program where nothing is shared between warps: no barrier, and 12 to 16 programs per multiprocessor.
CONFIGS: dict[int, Config] = {
    2: Config(
        scalars=Tile(2, 256, 1),
        output=Walk(256, 1, 51, 4),
        conv=Walk(256, 1, 26, 2),
        value=Walk(128, 1, 104),
        score=Tile(4, 256, 1, 158),
    ),
    4: Config(
        scalars=Tile(2, 256, 1),
        output=Walk(256, 1, 51, 4),
        conv=Walk(256, 1, 26, 2),
        value=Walk(128, 1, 104),
        score=Tile(2, 256, 1, 158),
    ),
}


def fit_block(block: int, channels: int) -> int:
    """Largest power of two up to `block` that a row of `channels` still needs."""
    return min(block, max(1 << (channels - 1).bit_length(), 16))


def fit_warps(warps: int, block: int) -> int:
    """Fewer warps where a tile would leave threads without an element."""
    return max(1, min(warps, block // 32))


def rows_per_span(rows: int, spans: int, step: int) -> int:
    """Rows per span, a multiple of `step`, so that about `spans` spans cover `rows`."""
    return -(-max(-(-rows // max(spans, 1)), MINIMUM_SPAN) // step) * step
