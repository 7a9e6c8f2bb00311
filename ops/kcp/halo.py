"""History rows across ranks for short convolutions: each fragment gets the `halo` rows before it, and the adjoint.

The extended shard is `[1, T_local + halo * F, D]`: every one of the F local fragments is preceded by exactly `halo`
rows, copied from the ranks that own them (several, if shards are shorter than the halo) and zero before the document's
start, so the shape does not depend on where documents lie. A causal operator then runs on it as on whole documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

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


def _index(copies: tuple[_Wanted, ...], field: str, device: torch.device) -> torch.Tensor:
    runs = [torch.arange(getattr(w, field), getattr(w, field) + w.rows) for w in copies]
    index = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
    return index.to(device, non_blocking=True)


def _local_rows(plan: RankPlan, halo: int, device: torch.device) -> torch.Tensor:
    """Extended row of each local row."""
    lengths = [f.end - f.start for f in plan.fragments if f.rank == plan.rank]
    runs, row = [], 0
    for length in lengths:
        runs.append(torch.arange(row + halo, row + halo + length))
        row += halo + length
    index = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
    return index.to(device, non_blocking=True)


def _halo(x: torch.Tensor, table: torch.Tensor, fragments: torch.Tensor, halo: int, group_name: str) -> torch.Tensor:
    plan = decode_plan(table)
    gives, takes = _copies(plan, halo)
    out = x.new_zeros(1, x.shape[1] + halo * (fragments.shape[0] - 1), x.shape[2])
    out[0, _local_rows(plan, halo, x.device)] = x[0]
    rows = x[0, _index(gives, "source", x.device)]
    sent, received = _splits(gives, plan.world_size, "taker"), _splits(takes, plan.world_size, "owner")
    out[0, _index(takes, "target", x.device)] = _exchange_rows(plan, rows, sent, received, group_name)
    return out


def _halo_fake(x, table, fragments, halo, group_name):
    return x.new_empty(1, x.shape[1] + halo * (fragments.shape[0] - 1), x.shape[2])


def _halo_backward(
    dy: torch.Tensor, table: torch.Tensor, fragments: torch.Tensor, halo: int, group_name: str
) -> torch.Tensor:
    """Adjoint: gradients of borrowed rows go home and are added there in fixed order, in fp32 with one rounding."""
    plan = decode_plan(table)
    gives, takes = _copies(plan, halo)
    dx = dy[0, _local_rows(plan, halo, dy.device)].to(torch.promote_types(dy.dtype, torch.float32))
    rows = dy[0, _index(takes, "target", dy.device)]
    sent, received = _splits(takes, plan.world_size, "owner"), _splits(gives, plan.world_size, "taker")
    returned = _exchange_rows(plan, rows, sent, received, group_name)
    offset = 0
    for w in gives:
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
