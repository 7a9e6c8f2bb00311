"""Reference of the gated delta rule in plain torch: the CPU implementation, and the meaning of the kernels.

One walk over chunk number, forward for the outputs and in reverse for the gradients; every step batches all documents
of a group and all heads. Arithmetic is fp32 (float64 for float64 inputs). What the tapes keep in q's dtype is rounded
where it is made, so the backward reads the same bits whether a tape was kept or rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..varlen import CHUNK, read_boundaries
from . import configs
from .arena import Arena, complete_tapes
from .chunk_math import (
    Gates,
    chunk_backward,
    delta_rows,
    expand_heads,
    gates,
    next_state,
    outputs,
    reduce_heads,
)
from .grid import Documents, Group, Step, documents_of, group_size, groups
from .inverse_rounding import rounded_core
from .tapes import FULL, KEPT, Tapes, new_tapes, state_dtype

L2NORM_EPS = 1e-6


@dataclass(frozen=True)
class Problem:
    """Inputs flattened to `[B * T, heads, width]` rows, with what every step needs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    documents: Documents
    scale: float
    use_qk_l2norm: bool
    dtype: torch.dtype

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def value_heads(self) -> int:
        return self.v.shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return len(self.documents.lengths), self.value_heads, self.q.shape[2], self.v.shape[2]

    def groups(self) -> Iterator[Group]:
        return groups(self.documents, group_size(*self.state_shape[1:]), self.q.device)

    def empty_document_states(self, given: torch.Tensor | None) -> torch.Tensor:
        """`[N, HV, K, V]` as an empty document leaves it, a copy; the walk overwrites the others."""
        states = self.q.new_zeros(self.state_shape, dtype=self.dtype)
        return states if given is None else states.copy_(given)

    def start_states(self, given: torch.Tensor | None, group: Group) -> torch.Tensor:
        """The group's rows of a `[N, HV, K, V]` state, zeros without one; a copy that the walk may overwrite."""
        if given is None:
            return self.q.new_zeros(len(group.host_lengths), *self.state_shape[1:], dtype=self.dtype)
        return given.index_select(0, group.order)


def make_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None,
    scale: float | None,
    use_qk_l2norm: bool,
) -> Problem:
    """Flattens the rows and reads the boundaries, raising ValueError for bad ones before anything is computed."""
    batch, tokens = q.shape[:2]
    boundaries = None if cu_seqlens is None else read_boundaries(cu_seqlens, tokens, chunk_offsets)
    return Problem(
        *(x.detach().flatten(0, 1) for x in (q, k, v, g, beta)),
        None if initial_state is None else initial_state.detach(),
        documents_of(batch, tokens, boundaries),
        q.shape[-1] ** -0.5 if scale is None else scale,
        use_qk_l2norm,
        state_dtype(q),
    )


def _flat(tapes: Tapes) -> Tapes:
    """Token tapes as rows `[B * T, ...]`, views; h is by chunk already."""
    return Tapes(
        *(tape if name == "h" or tape.dim() == 1 else tape.flatten(0, 1) for name, tape in tapes._asdict().items())
    )


def _row_norm(tile: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(sum of squares + eps), eps inside the root: a zero row has factor 1000, not infinity."""
    return ((tile * tile).sum(-1) + L2NORM_EPS).rsqrt_()


class Loader:
    """Tiles of one step: made from the inputs, or read from a tape that is there; made ones go to `made`."""

    def __init__(self, problem: Problem, step: Step, kept: Tapes, made: Tapes) -> None:
        self.problem, self.step, self.kept, self.made = problem, step, kept, made
        self.beta = step.gather(problem.beta, problem.dtype)

    def _keep(self, name: str, tile: torch.Tensor) -> None:
        tape = getattr(self.made, name)
        if tape.dim() > 1:
            self.step.scatter(tape, tile)

    def key(self) -> torch.Tensor:
        """Normalised k `[n, H, 64, K]`; the row factor is the k_rstd tape."""
        k = self.step.gather(self.problem.k, self.problem.dtype)
        return k.mul_(self.key_factor(k)[..., None])

    def key_factor(self, raw: torch.Tensor) -> torch.Tensor:
        if self.kept.k_rstd.dim() > 1:
            return self.step.gather(self.kept.k_rstd, self.problem.dtype)
        factor = _row_norm(raw) if self.problem.use_qk_l2norm else torch.ones_like(raw[..., 0])
        self._keep("k_rstd", factor)
        return factor

    def query(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw q `[n, H, 64, K]` and its row factor scale * r_q, the qscale tape."""
        raw = self.step.gather(self.problem.q, self.problem.dtype)
        if self.kept.qscale.dim() > 1:
            return raw, self.step.gather(self.kept.qscale, self.problem.dtype)
        factor = _row_norm(raw) if self.problem.use_qk_l2norm else torch.ones_like(raw[..., 0])
        factor = factor.mul_(self.problem.scale)
        self._keep("qscale", factor)
        return raw, factor

    def gates(self) -> Gates:
        made = gates(self.step.gather(self.problem.g, self.problem.dtype))
        self._keep("gcum", made.gcum)
        return made

    def core(self, k: torch.Tensor) -> torch.Tensor:
        """X rounded to the tape's dtype, as the backward will read it."""
        if self.kept.x.dim() > 1:
            return self.step.gather(self.kept.x, self.problem.dtype)
        x = rounded_core(k, self.beta, self.problem.q.dtype)
        self._keep("x", x)
        return x.to(self.problem.dtype)

    def expand(self, tile: torch.Tensor) -> torch.Tensor:
        return expand_heads(tile, self.problem.value_heads)


def _walk(problem: Problem, kept: Tapes, made: Tapes, o: torch.Tensor | None, final_state: torch.Tensor | None) -> None:
    """Forward walk: fills the tapes of `made`, and `o` and `final_state` where asked; reads the tapes of `kept`."""
    wants_query = o is not None or made.qscale.dim() > 1
    leg = configs.SPANS.leg
    for group in problem.groups():
        state = problem.start_states(problem.initial_state, group)
        for c in range(group.step_count()):
            step = group.step(c)
            load = Loader(problem, step, kept, made)
            now = state[: step.count]
            if made.h.dim() > 1:
                made.h.index_copy_(0, step.chunks, now.to(made.h.dtype))
            elif made.h.numel() and c and c % leg == 0:
                slots = group.starts[: step.count] // (CHUNK * leg) + c // leg - 1
                made.h.view(-1, *now.mT.shape[1:]).index_copy_(0, slots, now.mT)
            k_group = load.key()
            decays, x, k = load.gates(), load.core(k_group), load.expand(k_group)
            beta = load.beta[..., None]
            delta = delta_rows(k, step.gather(problem.v, problem.dtype), beta, decays, x, now)
            if made.delta.dim() > 1:
                step.scatter(made.delta, delta)
            v_new = delta.mul_(beta)
            if wants_query:
                q, factor = load.query()
                if o is not None:
                    step.scatter(o, outputs(load.expand(q.mul_(factor[..., None])), k, v_new, decays, now))
            now.copy_(next_state(k, v_new, decays, now))
        if final_state is not None:
            final_state.index_copy_(0, group.order, state)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None,
    *,
    scale: float | None,
    output_final_state: bool,
    use_qk_l2norm: bool,
    save_mode: str,
) -> tuple[torch.Tensor, ...]:
    """`(o, final_state, *tapes)` of the raw op; rows of no document are zero."""
    problem = make_problem(q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, scale, use_qk_l2norm)
    o = q.new_zeros(v.shape)
    final_state = (
        problem.empty_document_states(initial_state) if output_final_state else q.new_empty(0, dtype=problem.dtype)
    )
    made = new_tapes(q, v, cu_seqlens, KEPT[save_mode])
    none = new_tapes(q, v, cu_seqlens, ())
    _walk(problem, none, _flat(made), o.flatten(0, 1), final_state if output_final_state else None)
    return (o, final_state, *made)


def tapes_alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None,
    *,
    scale: float | None,
    use_qk_l2norm: bool,
) -> Tapes:
    """All six tapes, by the forward's walk without its output."""
    problem = make_problem(q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, scale, use_qk_l2norm)
    made = new_tapes(q, v, cu_seqlens, FULL)
    _walk(problem, new_tapes(q, v, cu_seqlens, ()), _flat(made), None, None)
    return made


def _input_gradient(
    raw: torch.Tensor, factor: torch.Tensor, rstd: torch.Tensor | None, d: torch.Tensor
) -> torch.Tensor:
    """Gradient of `raw` from that of `factor * raw`: with rstd r the factor is a constant times r, itself of `raw`."""
    if rstd is not None:
        d = d - (rstd * rstd * (d * raw).sum(-1))[..., None] * raw
    return d * factor[..., None]


def backward(
    do: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None,
    workspace: torch.Tensor | None,
    tapes: Tapes,
    *,
    scale: float | None,
    use_qk_l2norm: bool,
) -> tuple[torch.Tensor, ...]:
    """The six gradients of the raw backward op; missing tapes are rebuilt first, by the walk that makes them."""
    problem = make_problem(q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, scale, use_qk_l2norm)
    complete = complete_tapes(Arena(q.device, workspace), tapes, q, v, cu_seqlens)
    missing = tapes.missing()
    if missing:
        nothing = new_tapes(q, v, cu_seqlens, ())
        made = Tapes(
            *(
                new if name in missing else empty
                for name, new, empty in zip(Tapes._fields, complete, nothing, strict=True)
            )
        )
        _walk(problem, _flat(tapes), _flat(made), None, None)
    tapes = complete
    grads = [x.new_zeros(x.shape) for x in (q, k, v, g, beta)]
    if initial_state is None:
        dinitial_state = q.new_empty(0, dtype=problem.dtype)
    else:
        dinitial_state = problem.empty_document_states(dfinal_state)
    flat = tuple(x.flatten(0, 1) for x in grads)
    for group in problem.groups():
        dstate = problem.start_states(dfinal_state, group)
        for c in reversed(range(group.step_count())):
            _backward_step(problem, group.step(c), _flat(tapes), do.detach().flatten(0, 1), dstate, flat)
        if initial_state is not None:
            dinitial_state.index_copy_(0, group.order, dstate)
    return (*grads, dinitial_state)


def _backward_step(
    problem: Problem,
    step: Step,
    tapes: Tapes,
    do: torch.Tensor,
    dstate: torch.Tensor,
    grads: tuple[torch.Tensor, ...],
) -> None:
    """Gradients of one step's rows; `dstate` goes from the state after the chunk to the state before it."""
    load = Loader(problem, step, tapes, tapes)
    raw_k = step.gather(problem.k, problem.dtype)
    k_factor = load.key_factor(raw_k)
    raw_q, q_factor = load.query()
    k_group, q_group = raw_k * k_factor[..., None], raw_q * q_factor[..., None]
    now = dstate[: step.count]
    out = chunk_backward(
        load.expand(q_group),
        load.expand(k_group),
        load.beta[..., None],
        gates(step.gather(problem.g, problem.dtype)),
        load.core(k_group),
        tapes.h.index_select(0, step.chunks).to(problem.dtype),
        step.gather(tapes.delta, problem.dtype),
        step.gather(do, problem.dtype),
        now,
    )
    now.copy_(out.dstate)
    q_rstd = _row_norm(raw_q) if problem.use_qk_l2norm else None
    k_rstd = k_factor if problem.use_qk_l2norm else None
    dq = _input_gradient(raw_q, q_factor, q_rstd, reduce_heads(out.dq, problem.heads))
    dk = _input_gradient(raw_k, k_factor, k_rstd, reduce_heads(out.dk, problem.heads))
    for flat, tile in zip(grads, (dq, dk, out.dv, out.dg, out.dbeta), strict=True):
        step.scatter(flat, tile)
