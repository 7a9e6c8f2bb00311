"""`KcpContext`: what a rank needs to run the ops on its shard of a pack."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

if dist.is_available():
    # Its functions' default arguments are the process group at the time of this import. The first call of any custom op
    # imports it by way of Dynamo; if a group exists by then, they keep it alive past `destroy_process_group`, and a
    # thread of gloo that frees a tensor while Python ends aborts the process (2 of 8 runs of two ranks).
    import torch.distributed.nn.functional

from .partition import CHUNK, Fragment, Partition, check_count, check_partition, check_rank
from .plan import RankPlan, decode_plan, encode_plan, needs_map
from .planner import H200_SM_COUNT, P_RULES, kcp_plan_row
from .upload import upload_tables

# A rank may need any number of maps, none included, and compiled graphs take sizes 0 and 1 for constants. What has a
# size by that number has this much to spare, so that a pack with other numbers of maps is not a new graph.
SPARE = 2
EXCHANGES = ("ring", "all_to_all")


def _no_table() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


def _shifts(fragments: Sequence[Fragment]) -> tuple[list[int], list[int]]:
    """Runs of local tokens at one distance from their global position: local starts (and the end), distances."""
    starts, shifts, local = [], [], 0
    for f in fragments:
        if not shifts or f.start - local != shifts[-1]:
            starts.append(local)
            shifts.append(f.start - local)
        local += f.end - f.start
    return [*starts, local], shifts


@dataclass
class KcpContext:
    """One rank's view of a partitioned pack. Built by `build_kcp_context`; `prepare` makes the device tables.

    Attributes:
        part, rank, device, p_rule, exchange, sm_count: as given to `build_kcp_context`.
        group_name: name of the process group ("" for one rank): what compiled graphs carry.
        total_tokens: of the pack. Here and not asked of `part`: compiled graphs would guard on its documents.
        table: the plan as an int64 CPU tensor.
        pack: the pack's cu_seqlens as an int64 CPU tensor.
        map_rows: `[n + SPARE]` for n local segments that need a map; only its length matters, to compiled graphs.
        fragments: `[F + 1]` int64 on the device, local boundaries of the rank's fragments.
        segments: `[S + 1]` int64 on the device, local boundaries of the rank's segments.
        chunk_offsets: `[S + 1]` int64 on the device, 64-row chunks before each segment.
        positions: `[T_local]` int64 on the device, global position of each local token.
    """

    part: Partition
    rank: int
    device: torch.device
    p_rule: str | int
    exchange: str
    sm_count: int
    group_name: str
    heads: tuple[int, int] | None = None
    total_tokens: int = 0
    table: torch.Tensor = field(default_factory=_no_table)
    pack: torch.Tensor = field(default_factory=_no_table)
    map_rows: torch.Tensor = field(default_factory=_no_table)
    fragments: torch.Tensor = field(default_factory=_no_table)
    segments: torch.Tensor = field(default_factory=_no_table)
    chunk_offsets: torch.Tensor = field(default_factory=_no_table)
    positions: torch.Tensor = field(default_factory=_no_table)

    def prepare(self, H: int, HV: int) -> KcpContext:
        """Chooses P for (H, HV) heads and uploads the tables; no synchronising CUDA call. Returns the context.

        Raises:
            TypeError: H or HV not an int.
            ValueError: a count below 1, HV not a positive multiple of H.
        """
        check_count("H", H)
        check_count("HV", HV)
        if HV % H:
            raise ValueError(f"HV: expected a positive multiple of H = {H}, got {HV}")
        if self.heads == (H, HV):
            return self
        if isinstance(self.p_rule, int):
            row = [self.p_rule] * self.part.world_size
        else:
            row = kcp_plan_row(self.part, HV, sm_count=self.sm_count, p_rule=self.p_rule)
        self.table = encode_plan(self.part, self.rank, row)
        segments = self.plan.segments
        starts, shifts = _shifts(self.part.by_rank[self.rank])
        columns = {
            "segments": [0, *(s.end for s in segments)],
            "chunk_offsets": list(accumulate((-((s.start - s.end) // CHUNK) for s in segments), initial=0)),
            "fragments": self.part.local_cu_seqlens(self.rank),
            "lengths": [b - a for a, b in pairwise(starts)],
            "shifts": shifts,
        }
        tables = upload_tables({name: (torch.int64, values) for name, values in columns.items()}, self.device)
        self.segments, self.chunk_offsets = tables["segments"], tables["chunk_offsets"]
        self.fragments = tables["fragments"]
        if len(shifts) <= 1:
            self.positions = torch.arange(sum(shifts), sum(shifts) + starts[-1], device=self.device)
        else:  # output_size given, so repeat_interleave does not ask the device for the sum
            shift = torch.repeat_interleave(tables["shifts"], tables["lengths"], output_size=starts[-1])
            self.positions = shift.add_(torch.arange(starts[-1], device=self.device))
        self.pack = torch.tensor(self.part.cu_seqlens, dtype=torch.int64)
        self.map_rows = torch.zeros(SPARE + sum(needs_map(s) for s in segments), dtype=torch.int64)
        self.heads, self.total_tokens = (H, HV), self.part.total_tokens
        tables = (self.table, self.pack, self.map_rows, self.fragments, self.segments, self.chunk_offsets)
        _mark_sizes_dynamic(*tables, self.positions)
        return self

    @property
    def plan(self) -> RankPlan:
        """The rank's plan.

        Raises:
            RuntimeError: before `prepare`.
        """
        if not self.table.numel():
            raise RuntimeError("KcpContext: call prepare(H, HV) before using the context")
        return decode_plan(self.table)

    @property
    def local_tokens(self) -> int:
        return self.part.local_tokens(self.rank)


def build_kcp_context(
    part: Partition,
    group: dist.ProcessGroup | None,
    rank: int,
    device: torch.device | str,
    *,
    p_rule: str | int = "row_cost_lpt",
    exchange: str = "ring",
    sm_count: int | None = None,
) -> KcpContext:
    """Context of `rank` for the partition `part`; call `.prepare(H, HV)` before use.

    Args:
        part: from `kcp_partition`, equal on every rank.
        group: process group of `part.world_size` ranks; None for one rank.
        rank: this rank within the group.
        device: where the shards live.
        p_rule: how many segments a fragment is cut into: a planner rule ("one", "occ", "wave_fill1", "row_cost",
            "row_cost_lpt") or one number for every rank.
        exchange: "ring" (states travel from fragment to fragment) or "all_to_all" (maps travel at once); same bits.
        sm_count: multiprocessors the plan reckons with; must be equal on every rank. Default: the device's, 132 on CPU.

    Raises:
        TypeError: part is not a Partition, group not a process group, rank or sm_count not an int, device neither a
            torch.device nor a name or index of one.
        ValueError: rank or group size that does not fit the partition, an unknown rule, exchange or device.
    """
    check_partition(part)
    if not (group is None or hasattr(group, "group_name")):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    check_rank(rank, part)
    size = 1 if group is None else group.size()
    if size != part.world_size:
        raise ValueError(f"group: expected {part.world_size} ranks as in the partition, got {size}")
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange: expected one of {', '.join(EXCHANGES)}, got {exchange!r}")
    fixed = isinstance(p_rule, int) and not isinstance(p_rule, bool) and p_rule >= 1
    if not fixed and p_rule not in P_RULES:
        raise ValueError(f"p_rule: expected one of {', '.join(P_RULES)} or a positive number, got {p_rule!r}")
    device = _device(device)
    if sm_count is None:
        on_gpu = device.type == "cuda"
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else H200_SM_COUNT
    check_count("sm_count", sm_count)
    name = "" if group is None else group.group_name
    return KcpContext(part, rank, device, p_rule, exchange, sm_count, name)


def _device(device: object) -> torch.device:
    if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
        raise TypeError(f"device: expected a torch.device or its name, got {type(device).__name__}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected a torch.device or its name, got {device!r}") from error


def _mark_sizes_dynamic(*tables: torch.Tensor) -> None:
    """Sizes change from pack to pack: a graph compiled for one should take the next. No error where one cannot be."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes 1.5 s; absent, nothing is compiled yet
    if dynamo is not None:
        for table in tables:
            dynamo.maybe_mark_dynamic(table, 0)
