"""What a rank computes on its own segments, by the single-process ops: the CPU implementation and the meaning of the
kernel launches of `launch.py`, which has classes of the same interface.

Segments are walked as documents of their own from given start states. A run is a range of consecutive segments: its
tokens and chunks are consecutive too, so it is a slice of every tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..gated_delta_rule.tapes import KEPT, Tapes, new_tapes
from .plan import RankPlan, Run


class Inputs(NamedTuple):
    """The shard, `[1, T, heads, ...]`, and its segments as documents."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    segments: torch.Tensor
    chunk_offsets: torch.Tensor
    scale: float | None
    l2norm: bool

    @property
    def tokens(self) -> tuple[torch.Tensor, ...]:
        return self[:5]


def gather(x: torch.Tensor, plan: RankPlan, chosen: list[int]) -> torch.Tensor:
    """Rows of the chosen segments, one after the other."""
    if len(chosen) == len(plan.segments):
        return x
    return torch.cat([x[:, plan.segments[i].start : plan.segments[i].end] for i in chosen], dim=1)


def bounds(plan: RankPlan, chosen: list[int], device: torch.device) -> torch.Tensor:
    lengths = torch.tensor([0, *(plan.segments[i].end - plan.segments[i].start for i in chosen)], dtype=torch.int64)
    return lengths.cumsum(0).to(device, non_blocking=True)


def index_tensor(indices: list[int], device: torch.device) -> torch.Tensor:
    """Indices as a tensor on the device; from pageable memory, without waiting for the device."""
    return torch.tensor(indices, dtype=torch.int64).to(device, non_blocking=True)


def segment_maps(plan: RankPlan, chosen: list[int], x: Inputs) -> torch.Tensor:
    """M of the chosen segments, [n, HV, K, K] fp32.

    M is where the identity goes when nothing is written (v = 0); keys are upcast, so it is exact to fp32 (BUGS A3).
    """
    HV, K = x.v.shape[2], x.k.shape[3]
    if not chosen:
        return x.k.new_empty(0, HV, K, K, dtype=torch.float32)
    k, g, beta = gather(x.k, plan, chosen).float(), gather(x.g, plan, chosen), gather(x.beta, plan, chosen)
    eye = torch.eye(K, dtype=torch.float32, device=k.device).expand(len(chosen), HV, K, K).contiguous()
    zeros = k.new_zeros(1, k.shape[1], HV, K)
    return torch.ops.ple_gdn.gated_delta_rule(
        k, k, zeros, g, beta, eye, bounds(plan, chosen, k.device), None, None,
        scale=1.0, output_final_state=True, use_qk_l2norm=x.l2norm, save_mode="none",
    )[1]  # fmt: skip


def without_starts(tapes: Tapes) -> Tapes:
    """A segment begins with a state anyway."""
    return tapes if tapes.h.dim() > 1 else tapes._replace(h=tapes.delta.new_empty(0))


class ForwardRun:
    """Walks of one forward; `o`, `ends` and `tapes` are complete when every segment was walked."""

    def __init__(self, plan: RankPlan, x: Inputs, save_mode: str) -> None:
        self.plan, self.x, self.save_mode = plan, x, save_mode
        self.o = x.q.new_zeros(x.v.shape)
        self.tapes = without_starts(new_tapes(x.q, x.v, x.segments, KEPT[save_mode]))
        self.ends = x.q.new_empty(len(plan.segments), x.v.shape[2], x.k.shape[3], x.v.shape[3], dtype=torch.float32)

    def values(self, chosen: list[int], starts: torch.Tensor) -> dict[int, torch.Tensor]:
        """End states of the chosen segments from `starts` [S, HV, K, V], which holds what is known so far."""
        if not chosen:
            return {}
        x, device = self.x, self.x.q.device
        picked = starts.index_select(0, index_tensor(chosen, device))
        ends = torch.ops.ple_gdn.gated_delta_rule(
            *(gather(t, self.plan, chosen) for t in x.tokens), picked, bounds(self.plan, chosen, device), None, None,
            scale=x.scale, output_final_state=True, use_qk_l2norm=x.l2norm, save_mode="none",
        )[1]  # fmt: skip
        return dict(zip(chosen, ends, strict=True))

    def maps(self, chosen: list[int]) -> torch.Tensor:
        """Maps of the chosen segments, [n, HV, K, K] fp32."""
        return segment_maps(self.plan, chosen, self.x)

    def leaving(self, segment: int) -> torch.Tensor:
        """State that a walked segment hands on."""
        return self.ends[segment]

    def meanwhile(self) -> None:
        """What waits for no other rank and is not a walk from exchanged states; runs while they are on their way."""

    def walk(self, run: Run, starts: torch.Tensor) -> None:
        x, tokens = self.x, slice(run.start, run.end)
        part = list(range(run.first, run.last))
        o, ends, *tapes = torch.ops.ple_gdn.gated_delta_rule(
            *(t[:, tokens] for t in x.tokens), starts[run.first : run.last], bounds(self.plan, part, x.q.device),
            None, None, scale=x.scale, output_final_state=True, use_qk_l2norm=x.l2norm, save_mode=self.save_mode,
        )  # fmt: skip
        if run.whole:
            self.o, self.ends, self.tapes = o, ends, without_starts(Tapes(*tapes))
            return
        self.o[:, tokens] = o
        self.ends[run.first : run.last] = ends
        for name, made in Tapes(*tapes)._asdict().items():
            kept = getattr(self.tapes, name)
            if name == "h" and kept.dim() > 1:
                kept[run.first_chunk : run.last_chunk] = made[: run.last_chunk - run.first_chunk]
            elif kept.dim() > 1:
                kept[:, tokens] = made


class BackwardRun:
    """Adjoint walks of one backward; `gradients` and `dstarts` are complete when every segment was walked."""

    def __init__(self, plan: RankPlan, x: Inputs, do: torch.Tensor, starts: torch.Tensor, tapes: Tapes) -> None:
        self.plan, self.x, self.do, self.starts, self.tapes = plan, x, do, starts, tapes
        self.grads = [t.new_zeros(t.shape) for t in x.tokens]
        self.dstarts = torch.empty_like(starts)

    def values(self, chosen: list[int], ends: torch.Tensor) -> dict[int, torch.Tensor]:
        """Start-state gradients of the chosen segments from the end-state gradients `ends` known so far."""
        if not chosen:
            return {}
        x, device = self.x, self.x.q.device
        which = index_tensor(chosen, device)
        do, *tokens = (gather(t, self.plan, chosen) for t in (self.do, *x.tokens))
        none = [x.q.new_empty(0) for _ in Tapes._fields]
        dstarts = torch.ops.ple_gdn.gated_delta_rule_backward(
            do, ends.index_select(0, which), *tokens, self.starts.index_select(0, which),
            bounds(self.plan, chosen, device), None, None, *none, scale=x.scale, use_qk_l2norm=x.l2norm,
        )[-1]  # fmt: skip
        return dict(zip(chosen, dstarts, strict=True))

    def leaving(self, segment: int) -> torch.Tensor:
        return self.dstarts[segment]

    def meanwhile(self) -> None:
        """Nothing: the op that walks back replays what it needs."""

    def walk(self, run: Run, ends: torch.Tensor) -> None:
        x, tokens = self.x, slice(run.start, run.end)
        part = list(range(run.first, run.last))
        # Rows of h are bounded, not counted: a run's slice of them may overlap the next run's, which it does not read.
        bound = run.first_chunk + (run.end - run.start) // 64 + len(part)
        tapes = [
            t if t.dim() == 1 else t[run.first_chunk : bound] if name == "h" else t[:, tokens]
            for name, t in self.tapes._asdict().items()
        ]
        *grads, dstarts = torch.ops.ple_gdn.gated_delta_rule_backward(
            self.do[:, tokens], ends[run.first : run.last], *(t[:, tokens] for t in x.tokens),
            self.starts[run.first : run.last], bounds(self.plan, part, x.q.device), None, None, *tapes,
            scale=x.scale, use_qk_l2norm=x.l2norm,
        )  # fmt: skip
        if run.whole:
            self.grads, self.dstarts = grads, dstarts
            return
        self.dstarts[run.first : run.last] = dstarts
        for whole, part_grad in zip(self.grads, grads, strict=True):
            whole[:, tokens] = part_grad

    def gradients(self) -> list[torch.Tensor]:
        return self.grads
