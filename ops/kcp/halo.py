"""History rows across ranks for short convolutions: each fragment gets the `halo` rows before it, and the adjoint.

The extended shard is `[1, T_local + halo * F, D]`: every one of the F local fragments is preceded by exactly `halo`
rows, copied from the ranks that own them (several, if shards are shorter than the halo) and zero before the document's
start, so the shape does not depend on where documents lie. A causal operator then runs on it as on whole documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from ..register import register_op
from .plan import RankPlan, decode_plan


@dataclass(frozen=True)
class _Wanted:
    """`rows` consecutive rows, from local row `source` of rank `owner` to extended row `target` of rank `taker`."""

    owner: int
    source: int
    taker: int
    target: int
    rows: int


def _wanted(plan: RankPlan, halo: int) -> Iterator[_Wanted]:
    """Every copy between fragments of one document, in fragment order: the same list on every rank."""
    local_start: dict[int, int] = {}
    filled = [0] * plan.world_size
    count = [0] * plan.world_size
    extended_start: dict[int, int] = {}
    for i, f in enumerate(plan.fragments):
        local_start[i] = filled[f.rank]
        extended_start[i] = filled[f.rank] + halo * count[f.rank]
        filled[f.rank] += f.end - f.start
        count[f.rank] += 1
    for chain in plan.chains:
        for position, i in enumerate(chain):
            taker = plan.fragments[i]
            for j in reversed(chain[:position]):
                owner = plan.fragments[j]
                first = max(owner.start, taker.start - halo)
                if first >= owner.end:
                    break
                yield _Wanted(
                    owner.rank,
                    local_start[j] + first - owner.start,
                    taker.rank,
                    extended_start[i] + halo - (taker.start - first),
                    owner.end - first,
                )


@lru_cache(maxsize=64)
def _copies(plan: RankPlan, halo: int) -> tuple[tuple[_Wanted, ...], tuple[_Wanted, ...]]:
    """(rows this rank gives, rows it takes), each ordered by peer, then as `_wanted` lists them."""
    wanted = list(_wanted(plan, halo))
    gives = sorted((w for w in wanted if w.owner == plan.rank), key=lambda w: w.taker)
    takes = sorted((w for w in wanted if w.taker == plan.rank), key=lambda w: w.owner)
    return tuple(gives), tuple(takes)


def _exchange_rows(
    plan: RankPlan, rows: torch.Tensor, sent: list[int], received: list[int], group: str
) -> torch.Tensor:
    if plan.world_size == 1:
        return rows
    width = rows.shape[-1]
    flat = torch.ops._c10d_functional.all_to_all_single(
        rows.reshape(-1), [n * width for n in received], [n * width for n in sent], group
    )
    return torch.ops._c10d_functional.wait_tensor(flat).view(-1, width)


def _splits(copies: tuple[_Wanted, ...], world: int, peer: str) -> list[int]:
    out = [0] * world
    for w in copies:
        out[getattr(w, peer)] += w.rows
    return out


class _Indices(NamedTuple):
    """Rows of one plan's halo on the device: made once for all layers, forward and backward."""

    local: torch.Tensor  # extended row of each local row
    give: torch.Tensor  # local rows that are sent, by peer
    take: torch.Tensor  # extended rows that are received, by peer
    sent: list[int]  # rows for each peer
    received: list[int]


@lru_cache(maxsize=32)
def _indices(plan: RankPlan, halo: int, device: torch.device) -> _Indices:
    gives, takes = _copies(plan, halo)
    lengths = [f.end - f.start for f in plan.fragments if f.rank == plan.rank]
    starts = accumulate((halo + length for length in lengths), initial=halo)
    return _Indices(
        _rows(list(zip(starts, lengths, strict=False)), device),
        _rows([(w.source, w.rows) for w in gives], device),
        _rows([(w.target, w.rows) for w in takes], device),
        _splits(gives, plan.world_size, "taker"),
        _splits(takes, plan.world_size, "owner"),
    )


def _rows(runs: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """The rows of (start, length) runs, one after the other."""
    index = [torch.arange(start, start + length) for start, length in runs]
    return (torch.cat(index) if index else torch.empty(0, dtype=torch.int64)).to(device, non_blocking=True)


def _halo(x: torch.Tensor, table: torch.Tensor, fragments: torch.Tensor, halo: int, group_name: str) -> torch.Tensor:
    plan = decode_plan(table)
    at = _indices(plan, halo, x.device)
    out = x.new_zeros(1, x.shape[1] + halo * (fragments.shape[0] - 1), x.shape[2])
    out[0, at.local] = x[0]
    out[0, at.take] = _exchange_rows(plan, x[0, at.give], at.sent, at.received, group_name)
    return out


def _halo_fake(x, table, fragments, halo, group_name):
    return x.new_empty(1, x.shape[1] + halo * (fragments.shape[0] - 1), x.shape[2])


def _halo_backward(
    dy: torch.Tensor, table: torch.Tensor, fragments: torch.Tensor, halo: int, group_name: str
) -> torch.Tensor:
    """Adjoint: gradients of borrowed rows go home and are added there in fixed order, in fp32 with one rounding."""
    plan = decode_plan(table)
    at = _indices(plan, halo, dy.device)
    dx = dy[0, at.local].to(torch.promote_types(dy.dtype, torch.float32))
    returned = _exchange_rows(plan, dy[0, at.take], at.received, at.sent, group_name)
    offset = 0
    for w in _copies(plan, halo)[0]:
        # slices, not a scatter: a row lent to two fragments is added twice, in list order
        dx[w.source : w.source + w.rows] += returned[offset : offset + w.rows]
        offset += w.rows
    return dx.to(dy.dtype).unsqueeze(0)


def _halo_backward_fake(dy, table, fragments, halo, group_name):
    return dy.new_empty(1, dy.shape[1] - halo * (fragments.shape[0] - 1), dy.shape[2])


def _setup_context(ctx, inputs, output) -> None:
    _, table, fragments, ctx.halo, ctx.group_name = inputs
    ctx.save_for_backward(table, fragments)


def _autograd(ctx, dy):
    dx = torch.ops.ple_gdn.kcp_halo_backward(dy, *ctx.saved_tensors, ctx.halo, ctx.group_name)
    return dx, None, None, None, None


register_op("kcp_halo", _halo, _halo_fake).register_autograd(_autograd, setup_context=_setup_context)
register_op("kcp_halo_backward", _halo_backward, _halo_backward_fake)
