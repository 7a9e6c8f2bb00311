"""Device helpers of the Hopper walks: layouts, copies, tails, staging."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .. import ptx

# Triton after 3.6 renamed all three.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
NARROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
NARROW_LEFT = gl.constexpr(gl.DotOperandLayout(0, NARROW, 2))
WIDE_LEFT = gl.constexpr(gl.DotOperandLayout(0, WIDE, 2))
ACROSS = gl.constexpr(gl.SliceLayout(0, NARROW))
SPLIT_BF16 = gl.constexpr(ptx.SPLIT_PAIR_BF16)
SPLIT_FP16 = gl.constexpr(ptx.SPLIT_PAIR_FP16)
ROUND_BF16 = gl.constexpr(ptx.ROUND_PAIR_BF16)
ROUND_FP16 = gl.constexpr(ptx.ROUND_PAIR_FP16)


@gluon.jit
def locate(document, cu_ptr, offsets_ptr, T, chunks_per_row, VARLEN: gl.constexpr):
    """First row, length and first chunk of a document, as int32."""
    if VARLEN:
        start = gl.load(cu_ptr + document).to(gl.int32)
        length = gl.load(cu_ptr + document + 1).to(gl.int32) - start
        first = gl.load(offsets_ptr + document).to(gl.int32)
    else:
        start = document * T
        length = T
        first = document * chunks_per_row
    return start, length, first


@gluon.jit
def locate_piece(piece, table_ptr):
    """A row of the table of pieces, as device.locate_piece, in int32."""
    row = table_ptr + piece * 8
    start, length, first = gl.load(row).to(gl.int32), gl.load(row + 1).to(gl.int32), gl.load(row + 2).to(gl.int32)
    document, before, after = gl.load(row + 3), gl.load(row + 4), gl.load(row + 5)
    return start, length, first, document.to(gl.int32), before.to(gl.int32), after.to(gl.int32)


@gluon.jit
def clear_rows(tile, valid, WIDTH: gl.constexpr):
    """Rows from `valid` on become 0, 64 columns at a time.

    The fence makes these stores visible to the tensor cores, which read shared memory through the asynchronous proxy;
    the barrier waits for every thread's stores and fence before any warp issues a product.
    """
    rows = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    for part in gl.static_range(WIDTH // 64):
        block = tile.slice(part * 64, 64, dim=1)
        values = block.load(ROWS)
        block.store(gl.where((rows < valid)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def chunk_decay(row):
    """[1, 1]: e^G of the last row. From shared memory: a load from memory in flight would hold up the next fence."""
    return gl.exp(row.slice(63, 1).load(gl.SliceLayout(0, WIDE)))[None, :]


@gluon.jit
def pairs(text_bf16: gl.constexpr, text_fp16: gl.constexpr, x, dtype: gl.constexpr):
    """Where Triton reads `x.to(dtype)` as fp32 again it rounds by single conversions, of which 32 (F2F) take 256 cycles
    of a chunk's 2,000; a packed one serves two values."""
    if dtype == gl.bfloat16:
        out, high = gl.inline_asm_elementwise(
            text_bf16, "=&f,=&f,=&r,f,f", [x], dtype=(gl.float32, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        out, high = gl.inline_asm_elementwise(
            text_fp16, "=&f,=&f,=&r,f,f", [x], dtype=(gl.float32, gl.float16), is_pure=True, pack=2
        )
    return high, out


@gluon.jit
def split_terms(x, dtype: gl.constexpr):
    """x rounded to 16 bits, and what that takes away, as fp32."""
    return pairs(SPLIT_BF16, SPLIT_FP16, x, dtype)


@gluon.jit
def round_twice(x, dtype: gl.constexpr):
    """x rounded to 16 bits, and the same as fp32."""
    return pairs(ROUND_BF16, ROUND_FP16, x, dtype)


@gluon.jit
def start_staging():
    """The copies before have read the staging tiles: the thread that issued them knows, the barrier tells all."""
    tma.store_wait(0)
    thread_barrier()


@gluon.jit
def end_staging():
    """The fence shows the stores to the staging tiles to the copy engine; the barrier waits for all of them."""
    fence_async_shared()
    thread_barrier()


@gluon.jit
def send_rows(desc, out_ptr, staged, row, column, valid, STRIDE: gl.constexpr):
    """A staged tile to memory: whole by the copy engine, a partial one leaving the next document's rows alone."""
    if valid == 64:
        copy_out(desc, [row, column], staged)
    else:
        rows = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
        columns = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
        out = out_ptr + (gl.cast(row, gl.int64) * STRIDE + column) + rows[:, None] * STRIDE + columns[None, :]
        gl.store(out, staged.load(ROWS), mask=(rows < valid)[:, None] & (columns < 64)[None, :])
