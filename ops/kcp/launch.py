"""CUDA path of a rank's own walks: the kernels of the gated delta rule, launched on ranges of segments.

Against one op per phase (`local.py`), what does not depend on states runs once: prep and score tiles serve the
summaries, the maps and the walk; in the backward the summaries take the adjoint kernel alone, without gradients.
"""

from __future__ import annotations

import torch

from ..gated_delta_rule.arena import Arena
from ..gated_delta_rule.chunk_gradients import Tapes as GradientTapes
from ..gated_delta_rule.chunk_gradients import chunk_gradients
from ..gated_delta_rule.configs import block_width, select
from ..gated_delta_rule.launch import Problem, _check_packing, _packing, _prep_tapes, _walk_buffers, make_operands
from ..gated_delta_rule.tapes import Tapes
from ..gated_delta_rule.walks import Chunks, Documents, backward_walks, forward_walk, uses_hopper
from ..layout import packed
from ..triton_launch import launch
from .local import Inputs, index_tensor
from .map_kernel import map_kernel
from .plan import RankPlan, Run

Tensor = torch.Tensor
# Segments to summarise lie in runs; past this many, one launch over all of them costs less than the launches saved.
MOST_RUNS = 8


class _DeviceRun:
    """Inputs made dense, and everything of the chunks that needs no state: tapes, row table, score tiles."""

    def __init__(self, plan: RankPlan, x: Inputs, tapes: tuple[Tensor, ...] | None) -> None:
        self.plan = plan
        self.q, self.k, self.v, self.g, self.beta = (packed(t) for t in x.tokens)
        self.p = p = Problem.of(self.q, self.v, x.segments)
        self.arena = Arena(p.device)
        self.scale = p.K**-0.5 if x.scale is None else x.scale
        self.l2norm, self.empty = x.l2norm, p.T == 0 or not plan.segments
        self.configs = select(p.dtype.itemsize, p.K, p.V)
        self.states = (len(plan.segments), p.HV, p.K, p.V)
        rebuild = tapes is None
        self.prep = _prep_tapes(p, None) if rebuild else tapes
        self.table, self.scores = _walk_buffers(p, self.arena)
        if self.empty:
            return
        self.cu, self.offsets = _packing(p, x.segments, x.chunk_offsets)
        _check_packing(p, self.cu, self.offsets)
        make_operands(
            p, self.q, self.k, self.g, self.beta, self.cu, self.offsets, self.prep, self.table, self.scores,
            self.scale, self.l2norm, inverse=rebuild,
        )  # fmt: skip

    def parts(self, chosen: list[int]) -> list[Run]:
        runs = self.plan.runs(chosen)
        return runs if len(runs) <= MOST_RUNS else self.plan.runs(range(len(self.plan.segments)))

    def documents(self, run: Run) -> Documents:
        """The segments of a run. Copies: a slice's alignment would be another kernel to compile."""
        cut = slice(run.first, run.last + 1)
        tables = (self.cu, self.offsets) if run.whole else (self.cu[cut].clone(), self.offsets[cut].clone())
        return Documents(run.last - run.first, *tables)

    @property
    def chunks(self) -> Chunks:
        return Chunks(self.q, self.k, self.v, self.table, self.scores, self.prep[3])


class DeviceForwardRun(_DeviceRun):
    """See `local.ForwardRun`."""

    def __init__(self, plan: RankPlan, x: Inputs, save_mode: str) -> None:
        super().__init__(plan, x, None)
        p, full = self.p, save_mode == "full"
        self.full = full
        self.o = p.new(*self.v.shape)
        self.ends = p.new(*self.states, dtype=torch.float32)
        self.h = p.new(*((p.chunks, p.HV, p.K, p.V) if full else (0,)))
        self.delta = p.new(*(self.v.shape if full else (0,)))
        kept = tuple(t if save_mode != "none" else p.new(0, dtype=t.dtype) for t in self.prep)
        self.tapes = Tapes(*kept, self.h, self.delta)

    def values(self, chosen: list[int], starts: Tensor) -> dict[int, Tensor]:
        if not chosen:
            return {}
        ends = self.p.new(*self.states, dtype=torch.float32)
        for part in self.parts(chosen):
            self._launch(part, starts, ends, output=False)
        return {i: ends[i] for i in chosen}

    def maps(self, chosen: list[int]) -> Tensor:
        p = self.p
        out = p.new(len(chosen), p.HV, p.K, p.K, dtype=torch.float32)
        if chosen:
            config = self.configs.scan
            BN, stages = min(config.BV, block_width(p.K)), min(config.num_stages, 2)  # with 3, one CTA an SM, not two
            chosen_segments = index_tensor(chosen, p.device)
            arguments = (self.k, self.table, self.prep[3], self.cu, self.offsets, chosen_segments, None, out, p.T)
            launch(
                map_kernel, len(chosen) * p.HV * -(-p.K // BN), arguments, p.device, H=p.H, HV=p.HV, K=p.K,
                BK=block_width(p.K), BN=BN, DOT=p.dot, STAGES=stages, PIECES=False, num_warps=config.num_warps,
            )  # fmt: skip
        return out

    def leaving(self, segment: int) -> Tensor:
        return self.ends[segment]

    def meanwhile(self) -> None:
        pass

    def walk(self, run: Run, starts: Tensor) -> None:
        self._launch(run, starts, self.ends, output=True)

    def _launch(self, run: Run, starts: Tensor, ends: Tensor, output: bool) -> None:
        part = slice(run.first, run.last)
        forward_walk(
            self.p, self.chunks, self.documents(run), starts[part], self.o, ends[part], self.h, self.delta,
            store_final=True, store_h=self.full and output, output=output,
        )  # fmt: skip


class DeviceBackwardRun(_DeviceRun):
    """See `local.BackwardRun`. The buffers of dh and dR serve the summaries too, before the walk fills them."""

    def __init__(self, plan: RankPlan, x: Inputs, do: Tensor, starts: Tensor, tapes: Tapes) -> None:
        kept = tapes[:4]
        super().__init__(plan, x, None if any(t.dim() == 1 for t in kept) else kept)
        p = self.p
        self.do, self.starts = packed(do), starts
        self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (self.q, self.k, self.v))
        self.dg, self.dbeta = torch.empty_like(self.g), torch.empty_like(self.beta)
        self.dstarts = torch.empty_like(starts)
        self.h, self.delta = tapes.h, tapes.delta
        self.replay, self.replay_beside = self.h.dim() == 1 or self.delta.dim() == 1, not uses_hopper(p)
        if self.replay:
            self.h = self.arena.bind("h", (p.chunks, p.HV, p.K, p.V), p.dtype)
            self.delta = self.arena.bind("delta", tuple(self.v.shape), p.dtype)
        self.dh = self.arena.bind("dh", (p.chunks, p.HV, p.K, p.V), p.dtype)

    def values(self, chosen: list[int], ends: Tensor) -> dict[int, Tensor]:
        if not chosen:
            return {}
        dstarts = torch.empty_like(self.dstarts)
        for part in self.parts(chosen):
            self._launch(part, ends, dstarts, replay=False)
        return {i: dstarts[i] for i in chosen}

    def leaving(self, segment: int) -> Tensor:
        return self.dstarts[segment]

    def meanwhile(self) -> None:
        """Replays h and delta of all segments in one launch, where a replay shares no launch with an adjoint walk."""
        if self.replay and not self.replay_beside and not self.empty:
            (everything,) = self.plan.runs(range(len(self.plan.segments)))
            forward_walk(
                self.p, self.chunks, self.documents(everything), self.starts, self.dv, self.dstarts, self.h,
                self.delta, store_final=False, store_h=True, output=False,
            )  # fmt: skip

    def walk(self, run: Run, ends: Tensor) -> None:
        self._launch(run, ends, self.dstarts, replay=self.replay and self.replay_beside)

    def _launch(self, run: Run, ends: Tensor, dstarts: Tensor, replay: bool) -> None:
        part = slice(run.first, run.last)
        backward_walks(
            self.p, self.chunks, self.documents(run), self.do, ends[part], self.starts[part], self.dh, self.dv,
            dstarts[part], self.h, self.delta, store_dh0=True, replay=replay,
        )  # fmt: skip

    def gradients(self) -> list[Tensor]:
        p = self.p
        grads = [self.dq, self.dk, self.dv, self.dg, self.dbeta]
        if self.empty:
            return [grad.zero_() for grad in grads]
        tapes = GradientTapes(self.q, self.k, self.g, self.table, *self.prep[1:3], self.h, self.delta)
        documents = Documents(p.documents, self.cu, self.offsets)
        chunk_gradients(p, tapes, documents, self.do, self.dh, tuple(grads), self.scale, self.l2norm)
        return grads
