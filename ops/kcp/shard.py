"""Moving a whole pack to shards and back: `kcp_scatter`, `kcp_gather`, each the other's adjoint."""

from __future__ import annotations

import math

import torch

from ..register import register_op
from ..validation import check_device, check_int, check_tensor
from .context import KcpContext
from .plan import RankPlan, decode_plan


def kcp_scatter(x: torch.Tensor, ctx: KcpContext, dim: int = 1) -> torch.Tensor:
    """This rank's shard of a pack that every rank holds. Differentiable; the gradient of `x` on a rank covers the rows
    it owns and is zero elsewhere, so the sum over ranks is the gradient of the whole.

    Args:
        x: any tensor whose `dim` has the pack's tokens.
        ctx: a prepared `KcpContext`.

    Returns:
        A new tensor with `ctx.local_tokens` rows in `dim`, in local order.

    Raises:
        TypeError, ValueError: not a tensor, an unprepared context, `dim` of another length than the pack.
    """
    _check_context(ctx)
    _check(x, dim, ctx.total_tokens, "the pack's tokens", ctx)
    return x.index_select(dim, ctx.positions)


def kcp_gather(x: torch.Tensor, ctx: KcpContext, dim: int = 1) -> torch.Tensor:
    """The whole pack on every rank, from each rank's shard. Differentiable; the gradient of the shard on a rank is that
    of its rows in *this rank's* result (losses on several ranks are summed by the caller, as in data parallelism).

    Args:
        x: tensor whose `dim` has this rank's tokens in local order.
        ctx: a prepared `KcpContext`.

    Raises:
        TypeError, ValueError: not a tensor, an unprepared context, `dim` of another length than the shard.
    """
    _check_context(ctx)
    _check(x, dim, ctx.positions.shape[0], "this rank's tokens", ctx)
    rows = x.movedim(dim, 0)
    pack = torch.ops.ple_gdn.kcp_gather(rows, ctx.table, ctx.positions, ctx.total_tokens, ctx.group_name)
    return pack.movedim(0, dim)


def _check_context(ctx: object) -> None:
    if not isinstance(ctx, KcpContext):
        raise TypeError(f"ctx: expected a KcpContext, got {type(ctx).__name__}")
    if ctx.heads is None:
        raise ValueError("ctx: expected a prepared context; call ctx.prepare(H, HV) first")


def _check(x: torch.Tensor, dim: int, rows: int, what: str, ctx: KcpContext) -> None:
    check_tensor("x", x)
    check_int("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: expected a dimension of x, which has {x.dim()}, got {dim}")
    if x.shape[dim] != rows:
        raise ValueError(f"x: expected {rows} rows ({what}) in dimension {dim}, got shape {tuple(x.shape)}")
    check_device("x", x, ctx.positions.device, "the context")


def _order(plan: RankPlan) -> list[tuple[int, int, int]]:
    """(rank, start, end) of every fragment in global order."""
    return [(f.rank, f.start, f.end) for f in plan.fragments]


def _gather(
    rows: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, total: int, group_name: str
) -> torch.Tensor:
    plan = decode_plan(table)
    sizes = [0] * plan.world_size
    for rank, start, end in _order(plan):
        sizes[rank] += end - start
    width = math.prod(rows.shape[1:])  # not -1: a rank may own no rows
    flat = rows.reshape(rows.shape[0], width)
    if plan.world_size == 1:
        shards = [flat]
    else:
        outgoing = flat.repeat(plan.world_size, 1).reshape(-1)
        mine = flat.shape[0] * width
        received = torch.ops._c10d_functional.all_to_all_single(
            outgoing, [n * width for n in sizes], [mine] * plan.world_size, group_name
        )
        received = torch.ops._c10d_functional.wait_tensor(received).view(sum(sizes), width)
        shards = list(received.split(sizes))
    taken = [0] * plan.world_size
    out = flat.new_empty(total, width)
    for rank, start, end in _order(plan):
        length = end - start
        out[start:end] = shards[rank][taken[rank] : taken[rank] + length]
        taken[rank] += length
    return out.view(total, *rows.shape[1:])


def _gather_fake(rows, table, positions, total, group_name):
    return rows.new_empty(total, *rows.shape[1:])


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[2])


def _autograd(ctx, dy):
    (positions,) = ctx.saved_tensors
    return dy.index_select(0, positions), None, None, None, None


register_op("kcp_gather", _gather, _gather_fake).register_autograd(_autograd, setup_context=_setup_context)
