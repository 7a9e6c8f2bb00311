"""CUDA path of a rank's own walks: the kernels of the gated delta rule, launched on ranges of segments.

Against one op per phase (`local.py`), what does not depend on states runs once: prep and score tiles serve the
summaries, the maps and the walk; in the backward the summaries take the adjoint kernel alone, without gradients.
"""

from __future__ import annotations

import torch

from ..gated_delta_rule.arena import Arena
from ..gated_delta_rule.configs import block_width, select
from ..gated_delta_rule.gradients import gradient_kernel
from ..gated_delta_rule.launch import Problem, _packing, _prep, _prep_tapes, _scores, _walk_buffers
from ..gated_delta_rule.scan import adjoint_kernel, forward_kernel
from ..gated_delta_rule.tapes import Tapes
from .local import Inputs, index_tensor
from .map_kernel import map_kernel
from .plan import RankPlan, Run

Tensor = torch.Tensor
# Segments to summarise lie in runs; past this many, one launch over all of them costs less than the launches saved.
MOST_RUNS = 8


class _DeviceRun:
    """Inputs made contiguous, and everything of the chunks that needs no state: tapes, row table, score tiles."""

    def __init__(self, plan: RankPlan, x: Inputs, tapes: tuple[Tensor, ...] | None) -> None:
        self.plan = plan
        self.q, self.k, self.v, self.g, self.beta = (t.contiguous() for t in x.tokens)
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
        if rebuild:
            _prep(p, self.q, self.k, self.g, self.beta, self.cu, self.offsets, self.prep, self.scale, self.l2norm)
        _scores(p, self.q, self.k, self.beta, self.cu, self.offsets, self.prep, self.table, self.scores)

    def parts(self, chosen: list[int]) -> list[Run]:
        runs = self.plan.runs(chosen)
        return runs if len(runs) <= MOST_RUNS else self.plan.runs(range(len(self.plan.segments)))

    def boundaries(self, run: Run) -> tuple[Tensor, Tensor]:
        """Boundaries and chunk offsets of a run. Copies: a slice's alignment would be another kernel to compile."""
        cut = slice(run.first, run.last + 1)
        return (self.cu, self.offsets) if run.whole else (self.cu[cut].clone(), self.offsets[cut].clone())

    def chains(self, run: Run) -> int:
        return (run.last - run.first) * self.p.HV * -(-self.p.V // self.configs.scan.BV)

    @property
    def common(self) -> dict[str, object]:
        return {"V": self.p.V, "BK": block_width(self.p.K), "VARLEN": True, "DOT": self.p.dot, **self.p.heads}

    @property
    def scan(self) -> dict[str, object]:
        config = self.configs.scan
        return {"BV": config.BV, "STAGES": config.num_stages, "num_warps": config.num_warps}


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
            map_kernel[(len(chosen) * p.HV * -(-p.K // BN),)](
                self.k, self.table, self.prep[3], self.cu, self.offsets, index_tensor(chosen, p.device), out, p.T,
                **p.heads, BK=block_width(p.K), BN=BN, DOT=p.dot, STAGES=stages, num_warps=config.num_warps,
            )  # fmt: skip
        return out

    def walk(self, run: Run, starts: Tensor) -> None:
        self._launch(run, starts, self.ends, output=True)

    def _launch(self, run: Run, starts: Tensor, ends: Tensor, output: bool) -> None:
        p, part = self.p, slice(run.first, run.last)
        forward_kernel[(self.chains(run),)](
            self.q, self.k, self.v, self.table, self.scores, self.prep[3], starts[part], *self.boundaries(run),
            self.o, ends[part], self.h, self.delta, p.T, p.chunks_per_row, **self.common, HAS_H0=True, STORE_HT=True,
            STORE_H=self.full and output, OUTPUT=output, **self.scan,
        )  # fmt: skip


class DeviceBackwardRun(_DeviceRun):
    """See `local.BackwardRun`. The buffers of dh and dR serve the summaries too, before the walk fills them."""

    def __init__(self, plan: RankPlan, x: Inputs, do: Tensor, starts: Tensor, tapes: Tapes) -> None:
        kept = tapes[:4]
        super().__init__(plan, x, None if any(t.dim() == 1 for t in kept) else kept)
        p = self.p
        self.do, self.starts = do.contiguous(), starts
        self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (self.q, self.k, self.v))
        self.dg, self.dbeta = torch.empty_like(self.g), torch.empty_like(self.beta)
        self.dstarts = torch.empty_like(starts)
        self.h, self.delta = tapes.h, tapes.delta
        self.replay = self.h.dim() == 1 or self.delta.dim() == 1
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

    def walk(self, run: Run, ends: Tensor) -> None:
        self._launch(run, ends, self.dstarts, replay=self.replay)

    def _launch(self, run: Run, ends: Tensor, dstarts: Tensor, replay: bool) -> None:
        p, part, chains = self.p, slice(run.first, run.last), self.chains(run)
        adjoint_kernel[(chains * (2 if replay else 1),)](
            self.do, ends[part], self.q, self.k, self.v, self.table, self.scores, self.prep[3], self.starts[part],
            *self.boundaries(run), self.dh, self.dv, dstarts[part], self.h, self.delta, chains, p.T, p.chunks_per_row,
            **self.common, HAS_H0=True, HAS_DHT=True, STORE_DH0=True, REPLAY=replay, **self.scan,
        )  # fmt: skip

    def gradients(self) -> list[Tensor]:
        p, config = self.p, self.configs.gradient
        grads = [self.dq, self.dk, self.dv, self.dg, self.dbeta]
        if self.empty:
            return [grad.zero_() for grad in grads]
        gradient_kernel[(p.chunks * p.H,)](
            self.do, self.q, self.k, self.table, *self.prep[1:3], self.h, self.delta, self.dh, self.cu, self.offsets,
            *grads, self.scale, 1.0 / self.scale if self.scale else 0.0, p.documents, p.T, p.chunks_per_row,
            **self.common, BV=config.BV, L2NORM=self.l2norm, STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
        return grads
