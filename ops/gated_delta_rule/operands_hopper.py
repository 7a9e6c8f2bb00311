"""What both walks read, from one pass over q and k, in Gluon: gate sums, row factors, X, the row table, and P.

For 16-bit operands with K = 128 on Hopper; `prep` and `scores` hold the formulas and serve every other class.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .device_hopper import thread_barrier
from .inverse_hopper import (
    FP32_HEADS,
    FP32_TILE,
    FP32_TILES,
    PLAIN_2D,
    PLAIN_3D,
    exp,
    merge_blocks,
    reinterpret,
    solve_diagonals,
)

# Triton after 3.6 renamed it.
copy_in = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LOAD = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# P as it is stored, 32 bytes of a row by four lanes: neighbours have exchanged two columns for two.
STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
# [head, row]: one warp to a head, two rows a lane.
GATE = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _locate(chunk, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN: gl.constexpr):
    """device.locate_chunk."""
    if VARLEN:
        low = 0
        high = documents
        while high - low > 1:
            middle = (low + high) // 2
            before = gl.load(offsets_ptr + middle) <= chunk
            low = gl.where(before, middle, low)
            high = gl.where(before, high, middle)
        first = gl.load(offsets_ptr + low).to(gl.int64)
        start = gl.load(cu_ptr + low).to(gl.int64) + (chunk - first) * 64
        rows = gl.minimum(gl.load(cu_ptr + low + 1).to(gl.int64) - start, 64).to(gl.int32)
    else:
        row = chunk // chunks_per_row
        inner = (chunk - row * chunks_per_row) * 64
        start = row.to(gl.int64) * T + inner
        rows = gl.minimum(T - inner, 64).to(gl.int32)
    return start, rows


@gluon.jit
def _fetch(tile, ptr, stride: gl.constexpr, valid):
    """64 rows of 128 on their way to shared memory; rows past `valid` read 0."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, LOAD))
    columns = gl.arange(0, 128, gl.SliceLayout(0, LOAD))
    at = rows[:, None] * stride + columns[None, :]
    copy_in(tile, ptr + at, mask=(rows < valid)[:, None])


@gluon.jit
def _norm(products):
    """(sum of a row's squares + 1e-6)^-1/2 from the rows' products with each other: their own are on the diagonal."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, WIDE))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, WIDE))[None, :]
    return gl.rsqrt(gl.sum(gl.where(rows == columns, products, 0.0), 1) + 1e-6)


@gluon.jit
def _gates(g_ptr, beta_ptr, gcum_ptr, base, count, valid, HV: gl.constexpr, INVERSE: gl.constexpr):
    """beta and G of [4 heads, 64 rows]; padding rows carry beta 0 and the last G. The last comes alone, too."""
    heads = gl.arange(0, 4, gl.SliceLayout(1, GATE))
    rows = gl.arange(0, 64, gl.SliceLayout(0, GATE))
    live = (heads < count)[:, None] & (rows < valid)[None, :]
    at = rows[None, :] * HV + heads[:, None]
    beta = gl.load(beta_ptr + base + at, mask=live, other=0.0).to(gl.float32)
    if INVERSE:
        # Clamped at -88, where exp reaches 0 in fp32.
        g = gl.load(g_ptr + base + at, mask=live, other=0.0).to(gl.float32)
        G = gl.associative_scan(gl.where(g < -88.0, -88.0, g), 1, _add)
    else:
        G = gl.load(gcum_ptr + base + at, mask=live, other=0.0)
    last = gl.sum(gl.where((rows == valid - 1)[None, :], G, 0.0), 1)
    return beta, gl.where((rows < valid)[None, :], G, last[:, None]), last


@gluon.jit
def _alike(KK, norms_down, norms_across, valid):
    """1 if the keys of a chunk point one way, or against it: a mean |cosine| of pairs above 1/2. Else 0."""
    cosines = KK * norms_down[:, None] * norms_across[None, :]
    total = gl.sum(gl.sum(gl.maximum(cosines, -cosines), 1), 0)
    others = (valid * (valid - 1)).to(gl.float32)
    # Every row has a cosine of 1 with itself.
    return (total - valid.to(gl.float32) > 0.5 * others).to(gl.int32)


@gluon.jit
def _mark(gcum_ptr, G, last, mark, base, count, valid, HV: gl.constexpr):
    """G and its last row, the lowest bit of which (6e-8) tells the forward walk what `_alike` found."""
    heads = gl.arange(0, 4, gl.SliceLayout(1, GATE))
    rows = gl.arange(0, 64, gl.SliceLayout(0, GATE))
    last = (last.to(gl.int32, bitcast=True) & -2 | mark).to(gl.float32, bitcast=True)
    G = gl.where((rows < valid - 1)[None, :], G, last[:, None])
    live = (heads < count)[:, None] & (rows < valid)[None, :]
    gl.store(gcum_ptr + base + rows[None, :] * HV + heads[:, None], G, mask=live)
    return G, last


@gluon.jit
def _store_table(ptr, beta, G, last, k_factor, q_factor, count):
    """Row table of `scores`: beta, gamma kappa, kappa gamma_C / gamma, gamma qscale, G."""
    heads = gl.arange(0, 4, gl.SliceLayout(1, GATE))
    rows = gl.arange(0, 64, gl.SliceLayout(0, GATE))
    at = ptr + heads[:, None] * 320 + rows[None, :]
    present = (heads < count)[:, None] & (rows < 64)[None, :]
    k_row = k_factor.load(gl.SliceLayout(0, GATE))[None, :]
    q_row = q_factor.load(gl.SliceLayout(0, GATE))[None, :]
    gamma = exp(G)
    gl.store(at, beta, mask=present)
    gl.store(at + 64, gamma * k_row, mask=present)
    gl.store(at + 128, exp(last[:, None] - G) * k_row, mask=present)
    gl.store(at + 192, gamma * q_row, mask=present)
    gl.store(at + 256, G, mask=present)


@gluon.jit
def _share(KK, k_factor, G, beta):
    """In shared memory for every head: L in blocks, its diagonal blocks row by row, beta and G by block."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, WIDE))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, WIDE))[None, :]
    k_row = k_factor.load(gl.SliceLayout(1, WIDE))[:, None]
    L = gl.where(rows > columns, KK * k_row * k_factor.load(gl.SliceLayout(0, WIDE))[None, :], 0.0)
    tiles = gl.permute(gl.reshape(L, [4, 16, 4, 16]), (0, 2, 1, 3))
    blocks = gl.allocate_shared_memory(gl.float32, [16, 16, 16], FP32_TILES, gl.reshape(tiles, [16, 16, 16]))
    diagonal = gl.sum(gl.reshape(gl.where(rows // 16 == columns // 16, L, 0.0), [64, 4, 16]), 1)
    diagonal = gl.permute(gl.reshape(diagonal, [4, 16, 16]), (1, 0, 2))
    diagonals = gl.allocate_shared_memory(gl.float32, [16, 4, 16], PLAIN_3D, diagonal)
    by_block = gl.permute(gl.reshape(beta, [4, 4, 16]), (1, 0, 2))
    betas = gl.allocate_shared_memory(gl.float32, [4, 4, 16], PLAIN_3D, by_block)
    by_block = gl.permute(gl.reshape(G, [4, 4, 16]), (1, 0, 2))
    gates = gl.allocate_shared_memory(gl.float32, [4, 4, 16], PLAIN_3D, by_block)
    return (
        reinterpret(blocks, gl.float32, [16, 16, 16], FP32_TILE),
        reinterpret(diagonals, gl.float32, [16, 4, 16], PLAIN_2D),
        reinterpret(betas, gl.float32, [4, 4, 16], PLAIN_2D),
        reinterpret(gates, gl.float32, [4, 4, 16], PLAIN_2D),
    )


@gluon.jit(do_not_specialize=["scale", "documents", "T", "chunks_per_row"])
def hopper_operands_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, cu_ptr, offsets_ptr, gcum_ptr, k_rstd_ptr, qscale_ptr, x_ptr, rows_ptr, p_ptr,
    scale, documents, T, chunks_per_row,
    H: gl.constexpr, HV: gl.constexpr, VARLEN: gl.constexpr, L2NORM: gl.constexpr, INVERSE: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps per (chunk, q/k head, four value heads of its group). INVERSE: makes the tapes gcum, k_rstd,
    qscale and X; otherwise reads the first three."""
    GROUP: gl.constexpr = HV // H
    PARTS: gl.constexpr = (GROUP + 3) // 4
    pid = gl.program_id(0)
    part = pid % PARTS
    qk_head = pid // PARTS % H
    chunk = pid // (PARTS * H)
    if VARLEN:  # noqa: SIM102 (a constexpr guards a load)
        if chunk >= gl.load(offsets_ptr + documents):
            return
    start, valid = _locate(chunk, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN)
    count = gl.minimum(GROUP - part * 4, 4)
    head = qk_head * GROUP + part * 4
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    k_tile = gl.allocate_shared_memory(dtype, [64, 128], TILE)
    q_tile = gl.allocate_shared_memory(dtype, [64, 128], TILE)
    base = start * H + qk_head
    _fetch(k_tile, k_ptr + base * 128, H * 128, valid)
    _fetch(q_tile, q_ptr + base * 128, H * 128, valid)
    async_copy.commit_group()
    beta, G, last = _gates(g_ptr, beta_ptr, gcum_ptr, start * HV + head, count, valid, HV, INVERSE)
    index = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    inside = index < valid
    if not INVERSE:
        k_rstd = gl.load(k_rstd_ptr + base + index * H, mask=inside, other=0.0)
        qscale = gl.load(qscale_ptr + base + index * H, mask=inside, other=0.0)
    # The fence shows the copies to the tensor cores, the barrier waits for every thread's.
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    zero = gl.zeros([64, 64], gl.float32, WIDE)
    KK = zero
    if INVERSE:
        KK = warpgroup_mma(k_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    QK = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if INVERSE:
        if L2NORM:
            # Row norms: a product more instead of 370 instructions of every thread.
            QQ = warpgroup_mma(q_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            KK, QK, QQ = warpgroup_mma_wait(0, deps=[KK, QK, QQ])
            k_rstd = gl.where(inside, _norm(KK), 0.0)
            qscale = gl.where(inside, _norm(QQ), 0.0) * scale
        else:
            KK, QK = warpgroup_mma_wait(0, deps=[KK, QK])
            k_rstd = gl.where(inside, 1.0, 0.0)
            qscale = k_rstd * scale
        if part == 0:
            gl.store(k_rstd_ptr + base + index * H, k_rstd, mask=inside)
            gl.store(qscale_ptr + base + index * H, qscale, mask=inside)
    k_factor = gl.allocate_shared_memory(gl.float32, [64], VECTOR, k_rstd)
    q_factor = gl.allocate_shared_memory(gl.float32, [64], VECTOR, qscale)
    if INVERSE:
        if L2NORM:
            mark = _alike(KK, k_rstd, k_factor.load(gl.SliceLayout(0, WIDE)), valid)
        else:
            norms = _norm(KK)
            mark = _alike(KK, norms, gl.convert_layout(norms, gl.SliceLayout(0, WIDE)), valid)
        G, last = _mark(gcum_ptr, G, last, mark, start * HV + head, count, valid, HV)
    G_heads = gl.allocate_shared_memory(gl.float32, [4, 64], PLAIN_2D, G)
    G_heads = reinterpret(G_heads, gl.float32, [4, 64], VECTOR)
    chunk_head = chunk.to(gl.int64) * HV + head
    _store_table(rows_ptr + chunk_head * 320, beta, G, last, k_factor, q_factor, count)
    if not INVERSE:
        QK = warpgroup_mma_wait(0, deps=[QK])
    # Shared memory is laid out by last use, and a product uses its tiles until it is waited for, by every warp.
    k_tile._keep_alive()
    q_tile._keep_alive()
    thread_barrier()
    if INVERSE:
        blocks, diagonals, betas, gates = _share(KK, k_factor, G, beta)
    rows = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    columns = gl.arange(0, 64, gl.SliceLayout(0, WIDE))
    causal = rows[:, None] >= columns[None, :]
    k_column = k_factor.load(gl.SliceLayout(0, WIDE))[None, :]
    scores = QK * q_factor.load(gl.SliceLayout(1, WIDE))[:, None] * k_column
    out_rows = gl.arange(0, 64, gl.SliceLayout(1, STORE))[:, None]
    out_columns = gl.arange(0, 64, gl.SliceLayout(0, STORE))[None, :]
    for i in range(count):
        G_row = G_heads.index(i).load(gl.SliceLayout(1, WIDE))[:, None]
        G_column = G_heads.index(i).load(gl.SliceLayout(0, WIDE))[None, :]
        # exp may overflow above the diagonal, where it is not taken.
        P = gl.where(causal, scores * exp(G_row - G_column), 0.0)
        P = gl.convert_layout(P.to(dtype), STORE)
        gl.store(p_ptr + (chunk_head + i) * 4096 + out_rows * 64 + out_columns, P)
    if INVERSE:
        solved = gl.allocate_shared_memory(gl.float32, [4, 4, 16, 16], FP32_HEADS, solve_diagonals(diagonals, betas))
        merge_blocks(x_ptr + (start * HV + head) * 64, solved, blocks, gates, betas, count, valid, HV)
