"""Tapes of an eager gated delta rule under `torch.utils.checkpoint`: verdicts, lifetimes, bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracles.op_log import OpLog
from oracles.regions import HV, K, Stack, T, V, tokens
from oracles.tape_steps import (
    FULL,
    HANDED,
    LIGHT,
    REPLAYED,
    assert_same_bits,
    gradients,
    only_decision,
    step,
    verdicts,
)

import ple_gdn
from ple_gdn.ops.gated_delta_rule import eager_regions, tape_decisions

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    """No decision before a test, no open request after it."""
    tape_decisions._kept.clear()
    yield
    assert eager_regions.handed_bytes() == 0
    assert eager_regions._thread.requests == []


@pytest.mark.parametrize("layers", [1, 2, 4, 8])
def test_a_region_closed_by_the_rule_hands_over_what_a_tapes_only_op_makes(layers: int) -> None:
    log = step(Stack(closing=True, layers=layers))
    assert log.calls == HANDED * layers
    assert verdicts() == ["hand-off"] * layers
    decision = ple_gdn.last_tape_decision()
    assert decision.region == "Layer"
    assert "last saver" in decision.reason
    assert decision.bytes_at_stake == f"{LIGHT} bytes"
    assert decision.replay_cost.startswith(f"{T * HV * (4 * K * V + 2 * 64 * V)} FLOP")


@pytest.mark.parametrize("layers", [1, 2, 4, 8])
def test_a_region_with_savers_behind_the_rule_replays_and_makes_no_tape(layers: int) -> None:
    log = step(Stack(closing=False, layers=layers))
    assert log.calls == REPLAYED * layers
    assert verdicts() == ["replay"] * layers
    assert "saved behind it" in ple_gdn.last_tape_decision().reason
    assert max(alive for _, alive in log.alive_at) == 0


def test_handed_tapes_live_from_their_op_to_their_reader_and_no_longer() -> None:
    log = step(Stack(closing=True, layers=2))
    assert log.tape_bytes == 0
    names = [name for name, _ in log.alive_at]
    alive = dict(enumerate(bytes_ for _, bytes_ in log.alive_at))
    holders = [i for i in alive if alive[i]]
    readers = [i for i, name in enumerate(names) if name == "gated_delta_rule_backward"]
    assert [alive[i] for i in readers] == [FULL, FULL]
    # Between the tapes and their reader stand only allocations and views of the engine's.
    for maker, reader in zip([i for i, n in enumerate(names) if n == "gated_delta_rule_tapes"], readers, strict=True):
        assert set(names[maker + 1 : reader]) <= {"detach", "view", "empty", "new_empty", "new_zeros", "zeros", "alias"}
        assert [i for i in holders if maker < i <= reader] == list(range(maker + 1, reader + 1))
        holders = [i for i in holders if not maker < i <= reader]
    assert not holders


def test_a_forced_hand_off_keeps_the_tapes_through_every_later_saver() -> None:
    log = step(Stack(closing=False, reuse=True))
    assert only_decision().verdict == "hand-off"
    assert log.calls == REPLAYED
    later = [alive for name, alive in log.alive_at if name == "mm"]
    assert LIGHT in later
    assert log.tape_bytes == 0


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_all_forms_give_the_bits_of_the_plain_call(closing: bool, save_mode: str) -> None:
    expected = gradients(Stack(closing, 2, checkpointed=False, save_mode=save_mode))
    for reuse in (True, False, "auto"):
        assert_same_bits(gradients(Stack(closing, 2, reuse=reuse, save_mode=save_mode)), expected)


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("reuse", [True, False, "auto"])
def test_a_checkpointed_forward_retains_nothing_but_its_output(closing: bool, reuse: bool | str) -> None:
    model = Stack(closing, 2, reuse=reuse, save_mode="full")
    x = tokens().requires_grad_()
    with OpLog() as log:
        y = model(x)
        boundary = y.numel() * y.element_size()
        # The first layer's output is the second's input.
        assert log.alive_bytes == 2 * boundary
        y.sum().backward()
        del y
        model.zero_grad()
        x.grad = None
        assert log.alive_bytes == 0


def test_retain_graph_reruns_the_region_for_each_backward() -> None:
    model = Stack(closing=True)
    y = model(tokens()).square().sum()
    parameters = list(model.parameters())
    with OpLog() as log:
        first = torch.autograd.grad(y, parameters, retain_graph=True)
        assert log.tape_bytes == 0
        second = torch.autograd.grad(y, parameters)
        assert log.tape_bytes == 0
    assert log.calls == HANDED * 2
    assert verdicts() == ["hand-off"] * 2
    assert_same_bits(first, second)


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("backend", [None, "ple_gdn"])
def test_two_microbatches_run_backward_in_either_order(closing: bool, backend: str | None) -> None:
    torch._dynamo.reset()
    model = Stack(closing, 2)
    run = model if backend is None else torch.compile(model, backend=backend)
    one, two = tokens().requires_grad_(), tokens().mul(0.5).requires_grad_()
    expected = []
    for x in (one, two):
        expected.append(torch.autograd.grad(run(x).square().sum(), (x, *model.parameters())))
    outputs = [run(x).square().sum() for x in (one, two)]
    actual = {}
    for i in (1, 0):
        actual[i] = torch.autograd.grad(outputs[i], ((one, two)[i], *model.parameters()))
    assert_same_bits(actual[0], expected[0])
    assert_same_bits(actual[1], expected[1])
