"""Paths of one computation that must not differ in a bit: eager, compiled, checkpointed, replayed, context parallel."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from oracles import gated_residual as eager
from oracles.gated_residual import mismatches
from oracles.gdn import relative_rms, token_recurrence
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ple_gdn

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, WIDTH, TOKENS = 1, 16, 256


def _one_rank(segments: int, tokens: int = TOKENS) -> ple_gdn.KcpContext:
    part = ple_gdn.kcp_partition([0, tokens], 1)
    return ple_gdn.build_kcp_context(part, None, 0, "cpu", p_rule=segments).prepare(HEADS, HEADS)


def _call(tensors: tuple[Tensor, ...], **options: object) -> Tensor:
    return ple_gdn.gated_delta_rule(*tensors, use_qk_l2norm=True, **options)[0]


PATHS: dict[str, Callable[..., Tensor]] = {
    "tapes kept": lambda *x: _call(x, save_mode="full"),
    "compiled": torch.compile(lambda *x: _call(x), backend="aot_eager", fullgraph=True),
    "recomputed, tapes handed over": lambda *x: checkpoint(
        lambda *y: _call(y, reuse_recompute_tapes=True), *x, use_reentrant=False
    ),
    "recomputed, tapes replayed": lambda *x: checkpoint(
        lambda *y: _call(y, reuse_recompute_tapes=False), *x, use_reentrant=False
    ),
    "context parallel": lambda *x: _call(x, cp=_one_rank(1)),
}


@pytest.mark.parametrize("beta_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS)
def test_beta_and_the_norm_of_keys_are_rounded_by_no_path(path: str, beta_dtype: torch.dtype) -> None:
    """sigmoid(0.5) is 0.62245935 in float32 and 0.62109375 in bfloat16: what arrives is what is used, everywhere."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(3, 1, 1, HEADS, WIDTH, generator=generator).bfloat16()
    q, k, v = row.expand(3, 1, TOKENS, HEADS, WIDTH).clone().unbind()
    beta = torch.sigmoid(torch.full((1, TOKENS, HEADS), 0.5, dtype=beta_dtype))
    g = torch.full((1, TOKENS, HEADS), -1e-3)
    results = []
    for run in (lambda *x: _call(x), PATHS[path]):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
        o = run(*leaves)
        results.append((o.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)))
    assert [mismatches(a, b) for a, b in zip(*results, strict=True)] == [0] * 6


def test_beta_in_float32_and_in_bfloat16_are_told_apart() -> None:
    assert torch.sigmoid(torch.tensor(0.5)).item() != torch.sigmoid(torch.tensor(0.5).bfloat16()).item()
    x = torch.nn.functional.normalize(torch.ones(1, 8, 1, 16), dim=-1)
    outputs = [
        _call((x, x, x, torch.zeros(1, 8, 1), torch.sigmoid(torch.full((1, 8, 1), 0.5, dtype=dtype))))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert not torch.equal(*outputs)


def _entry_error(segments: int) -> float:
    """Error of the final state when a near-identity transition is chained over the segments of one long document."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, 64 * segments, HEADS, WIDTH)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(3))
    g, beta = torch.zeros(shape[:3]), torch.full(shape[:3], 0.01)
    state = torch.randn(1, HEADS, WIDTH, WIDTH, generator=generator)
    _, final = ple_gdn.gated_delta_rule(
        *(q, k, v, g, beta),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm=True,
        cp=_one_rank(segments, 64 * segments),
    )
    wide = [x.double() for x in (q, k, v, g, beta, state)]
    return relative_rms(final, token_recurrence(*wide, (0, 64 * segments), 0.25, True)[1])


def test_chained_transitions_do_not_lose_precision_with_the_number_of_segments() -> None:
    errors = {segments: _entry_error(segments) for segments in (2, 4, 8)}
    assert max(errors.values()) < 5e-6, errors
    assert errors[8] < 3 * errors[2] + 1e-6, errors


def test_a_norm_behind_an_injection_reads_the_rounded_sum() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, streams = (torch.randn(8, n, generator=generator).bfloat16() for n in (16, 64))
    weights, scale = torch.rand(8, 4, generator=generator).bfloat16(), torch.zeros(64).bfloat16()

    def block(hidden: Tensor, streams: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        residual = eager.inject(hidden, streams, weights)
        return residual, eager.grouped_rms_norm(residual, scale, 16)

    unrounded = streams.float() + (hidden.float()[:, None] * weights.float()[..., None]).flatten(-2)
    assert not torch.equal(eager.grouped_rms_norm(unrounded, scale, 16).bfloat16(), block(hidden, streams, weights)[1])
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="ple_gdn", fullgraph=True)(hidden, streams, weights)
    for ours, theirs in zip(compiled, block(hidden, streams, weights), strict=True):
        assert mismatches(ours, theirs) == 0


def test_a_recomputed_region_sees_the_bits_of_its_first_run() -> None:
    seen: list[Tensor] = []

    @torch.library.custom_op("ple_gdn_tests::note", mutates_args=())
    def note(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x.clone()

    note.register_fake(torch.empty_like)
    note.register_autograd(lambda ctx, dy: dy)

    def region(x: Tensor, weight: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        y = note(eager.grouped_rms_norm(x, weight, 16))
        y = y.unflatten(-1, (-1, 16))
        return _call((y, y, y, g, beta)).square().mean()

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 70, 32, generator=generator).bfloat16().requires_grad_()
    weight, g = torch.zeros(32), -torch.rand(1, 70, 2, generator=generator)
    beta = torch.rand(1, 70, 2, generator=generator)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: checkpoint(region, *x, use_reentrant=False), backend="ple_gdn", fullgraph=True)
    compiled(x, weight, g, beta).backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_two_microbatches_may_be_differentiated_in_the_opposite_order(how: str) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return checkpoint(lambda *x: _call(x).square().sum(), q, k, v, g, beta, use_reentrant=False)

    run = loss if how == "eager" else torch.compile(loss, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(4)
    batches = []
    for _ in range(2):
        three = [torch.randn(1, 66, 1, 16, generator=generator) for _ in range(3)]
        batches.append([*three, -torch.rand(1, 66, 1, generator=generator), torch.rand(1, 66, 1, generator=generator)])
    alone = [[x.clone().requires_grad_() for x in batch] for batch in batches]
    for leaves in alone:
        loss(*leaves).backward()
    together = [[x.clone().requires_grad_() for x in batch] for batch in batches]
    losses = [run(*leaves) for leaves in together]
    for one in reversed(losses):
        one.backward()
    for ours, theirs in zip(itertools.chain(*together), itertools.chain(*alone), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
