"""Which eager checkpoint regions hand tapes over, and which replay: hooks, releases, nesting, selection, threads."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracles.op_log import OpLog
from oracles.regions import HV, Gdn, H, K, Stack, T, V, W, tokens
from oracles.tape_steps import (
    HANDED,
    REPLAYED,
    assert_same_bits,
    gradients,
    only_decision,
    region,
    step,
    verdicts,
)
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    GraphExecGroup,
    _CheckpointFrame,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import ple_gdn
from ple_gdn.ops import torch_versions
from ple_gdn.ops.gated_delta_rule import eager_regions, tape_decisions

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    """No decision before a test, no open request after it."""
    tape_decisions._kept.clear()
    yield
    assert eager_regions.handed_bytes() == 0
    assert eager_regions._thread.requests == []


@pytest.mark.parametrize("closing", [True, False])
def test_without_early_stop_the_rerun_needs_the_output_and_replays(closing: bool) -> None:
    model = Stack(closing)
    expected = gradients(model)
    tape_decisions._kept.clear()
    assert_same_bits(gradients(model, region(model, early_stop=False)), expected)
    with set_checkpoint_early_stop(False):
        y = model(tokens())
    with OpLog() as log:
        y.square().sum().backward()
    assert log.calls == REPLAYED
    assert verdicts() == ["replay"] * 2
    assert "early stop" in ple_gdn.last_tape_decision().reason


def test_saved_tensor_hooks_around_a_region_replay() -> None:
    model = Stack(closing=True)
    expected = gradients(model)
    tape_decisions._kept.clear()

    def offloaded(x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return model(x)

    assert_same_bits(gradients(model, offloaded), expected)
    assert only_decision().verdict == "replay"
    assert "around the region" in only_decision().reason


def test_saved_tensor_hooks_inside_a_region_replay() -> None:
    model = Stack(closing=True)
    expected = gradients(model)
    tape_decisions._kept.clear()
    packed = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda t: packed.append(t.numel()) or t, lambda t: t):
            return model.layers[0](x)

    assert_same_bits(gradients(model, lambda x: checkpoint(inner, x, use_reentrant=False)), expected)
    assert only_decision().verdict == "replay"
    assert "inside the region" in only_decision().reason
    assert T * HV * 64 not in packed


def test_hooks_that_are_active_in_the_backward_alone_change_nothing() -> None:
    log = step(Stack(closing=True), backward_context=save_on_cpu())
    assert log.calls == HANDED
    assert verdicts() == ["hand-off"]


@pytest.mark.parametrize("closing", [True, False])
def test_a_reentrant_checkpoint_replays(closing: bool) -> None:
    model = Stack(closing)
    expected = gradients(model)
    tape_decisions._kept.clear()
    run = region(model, use_reentrant=True)
    assert_same_bits(gradients(model, run), expected)
    assert "reentrant" in only_decision().reason
    log = step(run)
    assert log.calls == REPLAYED
    assert max(alive for _, alive in log.alive_at) == 0


@pytest.mark.parametrize("closing", [True, False])
def test_an_unlisted_release_replays_without_reading_the_frame(closing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pack: Callable) -> None:
        raise AssertionError("read the frame of an unlisted release")

    model = Stack(closing)
    expected = gradients(model)
    tape_decisions._kept.clear()
    monkeypatch.setattr(torch, "__version__", "2.98.1+cpu")
    monkeypatch.setattr(eager_regions, "region_of", forbidden)
    assert_same_bits(gradients(model), expected)
    assert only_decision().verdict == "replay"
    assert "2.98.1" in only_decision().reason
    assert step(model).calls == REPLAYED


@pytest.mark.parametrize("release", torch_versions.VERIFIED_CHECKPOINTS)
@pytest.mark.parametrize("tag", ["", "+cpu", "+cu130"])
def test_releases_are_compared_without_their_local_tag(release: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "+" not in release
    monkeypatch.setattr(torch, "__version__", release + tag)
    assert torch_versions.checkpoint_is_verified()
    for other in (f"{release}0", f"{release}.post1", f"{release}a0", "2.12.0", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", other + tag)
        assert not torch_versions.checkpoint_is_verified()


def test_this_release_is_listed_so_the_tests_above_read_a_real_frame() -> None:
    assert torch_versions.checkpoint_is_verified()


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing_keeps_what_its_policy_says(kept: bool) -> None:
    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        mine = op is torch.ops.ple_gdn.gated_delta_rule.default
        return CheckpointPolicy.MUST_SAVE if mine and kept else CheckpointPolicy.PREFER_RECOMPUTE

    model = Stack(closing=True)
    expected = gradients(model)
    tape_decisions._kept.clear()
    run = region(model, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    assert_same_bits(gradients(model, run), expected)
    assert only_decision().verdict == "saved"
    log = step(run)
    assert log.calls == (REPLAYED[1:] if kept else REPLAYED)


def test_of_two_rules_in_one_region_the_last_hands_over_and_the_other_replays() -> None:
    torch.manual_seed(0)
    first, last = Gdn(), Gdn()

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: last(first(t)), x, use_reentrant=False)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return last(first(x))

    both = torch.nn.ModuleList([first, last])
    assert_same_bits(gradients(both, run), gradients(both, plain))
    assert verdicts() == ["replay", "hand-off"]
    assert step(run).calls == ["gated_delta_rule", *HANDED, "gated_delta_rule_backward"]


def test_one_module_applied_twice_is_two_places() -> None:
    torch.manual_seed(0)
    module = Gdn()

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, checkpoint(module, x, use_reentrant=False), use_reentrant=False)

    assert_same_bits(gradients(module, run), gradients(module, lambda x: module(module(x))))
    assert verdicts() == ["hand-off"] * 2
    inside = lambda x: checkpoint(lambda t: module(module(t)), x, use_reentrant=False)  # noqa: E731
    assert_same_bits(gradients(module, inside), gradients(module, run))
    assert verdicts()[2:4] == ["replay", "hand-off"]


@pytest.mark.parametrize("behind", [True, False])
def test_nested_regions_decide_by_the_innermost(behind: bool) -> None:
    model = Stack(closing=True)
    layer = model.layers[0]

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(layer, x.sin(), use_reentrant=False)
        return y.sin() if behind else y

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(outer, x, use_reentrant=False)

    def plain(x: torch.Tensor) -> torch.Tensor:
        y = layer(x.sin())
        return y.sin() if behind else y

    assert_same_bits(gradients(model, run), gradients(model, plain))
    assert verdicts() == ["hand-off"]
    log = step(run)
    assert log.calls[-2:] == HANDED
    assert log.tape_bytes == 0


def test_a_rerun_that_another_node_asked_for_hands_nothing_over() -> None:
    torch.manual_seed(0)
    gdn, other = Gdn(), torch.nn.Linear(W, W)

    def branches(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = other(x).sin()
        return left, gdn(x)

    x = tokens().requires_grad_()
    expected = torch.autograd.grad([y.square().sum() for y in branches(x)], (x, *gdn.parameters()))
    left, right = checkpoint(branches, x, use_reentrant=False)
    with OpLog() as log:
        # The left branch's backward alone reruns the region to its end.
        torch.autograd.grad(left.square().sum(), other.weight, retain_graph=True)
        assert "another node" in only_decision().reason
        assert log.calls == []
        assert log.tape_bytes == 0
        actual = torch.autograd.grad([left.square().sum(), right.square().sum()], (x, *gdn.parameters()))
    assert log.tape_bytes == 0
    assert_same_bits(actual, expected)


def test_a_rerun_for_one_rule_does_not_hand_it_the_tapes_of_another() -> None:
    torch.manual_seed(0)
    left, right = Gdn(), Gdn()
    x = tokens().requires_grad_()
    wanted = (x, left.proj.weight)
    expected = torch.autograd.grad(left(x).square().sum(), wanted)
    y, _ = checkpoint(lambda t: (left(t), right(t)), x, use_reentrant=False)
    with OpLog() as log:
        # The region's last saver is rerun while the first one waits for its inputs.
        actual = torch.autograd.grad(y.square().sum(), wanted)
    assert log.calls == REPLAYED
    assert_same_bits(actual, expected)
    assert verdicts() == ["replay"] * 2


def test_a_rerun_of_the_outer_region_does_not_answer_the_inner_one() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, T, H, K), (1, T, H, K), (1, T, HV, V), (1, T, HV), (1, T, HV))
    q, k, v, g, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    g, beta = -g.abs(), beta.sigmoid()

    def rule(x: torch.Tensor) -> torch.Tensor:
        return ple_gdn.gated_delta_rule(x, k, v, g, beta, use_qk_l2norm=True)[0]

    def outer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # One tensor is saved before either rule: both are at position 1 of their regions.
        y = checkpoint(lambda t: rule(t.exp()), x, use_reentrant=False)
        return y, rule(x.detach().requires_grad_() * 3)

    q.requires_grad_()
    (expected,) = torch.autograd.grad(rule(q.exp()).square().sum(), q)
    y, _ = checkpoint(outer, q, use_reentrant=False)
    (actual,) = torch.autograd.grad(y.square().sum(), q)
    assert_same_bits([actual], [expected])
    assert verdicts() == ["replay", "hand-off"]


def test_a_backward_inside_the_region_gets_its_tapes_too() -> None:
    model = Stack(closing=True)
    layer = model.layers[0]

    def inner(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y + slope

    expected = gradients(model, inner)
    assert_same_bits(gradients(model, lambda x: checkpoint(inner, x, use_reentrant=False)), expected)
    assert "hand-off" in verdicts()


def test_a_group_of_backwards_reruns_the_region_once() -> None:
    model = Stack(closing=True)
    y = model(tokens().requires_grad_())
    with GraphExecGroup(), OpLog() as log:
        y.square().sum().backward()
    assert log.calls == HANDED
    assert log.tape_bytes == 0


def test_a_backward_that_raises_leaves_no_tapes() -> None:
    model = Stack(closing=True)
    x = tokens().requires_grad_()
    y = model(x)
    model.layers[0].gdn.proj.weight.register_hook(lambda grad: 1 / 0)
    with OpLog() as log, pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert log.calls == HANDED
    del y
    assert log.tape_bytes == 0


@pytest.mark.parametrize("keywords", [{"debug": True}, {"determinism_check": "none"}, {"preserve_rng_state": False}])
def test_other_arguments_of_checkpoint_do_not_matter(keywords: dict) -> None:
    model = Stack(closing=True)
    expected = gradients(model)
    tape_decisions._kept.clear()
    assert_same_bits(gradients(model, region(model, **keywords)), expected)
    assert only_decision().verdict == "hand-off"


def test_a_region_under_autocast_hands_over() -> None:
    model = Stack(closing=True)
    bits = []
    for run in (model.layers[0], region(model)):
        with torch.autocast("cpu", torch.bfloat16):
            bits.append(gradients(model, run))
    assert_same_bits(*bits)
    assert verdicts() == ["hand-off"]


def test_context_parallel_calls_replay_in_a_region() -> None:
    packing = torch.tensor([0, 40, T])
    context = ple_gdn.build_kcp_context(ple_gdn.kcp_partition(packing, 1), None, 0, "cpu").prepare(H, HV)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, T, H, K), (1, T, H, K), (1, T, HV, V), (1, T, HV), (1, T, HV))
    q, k, v, g, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v, -g.abs(), beta.sigmoid())]

    def rule(*tensors: torch.Tensor) -> torch.Tensor:
        return ple_gdn.gated_delta_rule(*tensors, use_qk_l2norm=True, cp=context)[0]

    expected = torch.autograd.grad(rule(*leaves).square().sum(), leaves)
    y = checkpoint(rule, *leaves, use_reentrant=False)
    with OpLog() as log:
        actual = torch.autograd.grad(y.square().sum(), leaves)
    assert_same_bits(actual, expected)
    assert only_decision().verdict == "replay"
    assert max(alive for _, alive in log.alive_at) == 0


def test_frames_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        # One by one: frames that an earlier test left behind may go meanwhile, so a count proves nothing.
        before = weakref.WeakSet(o for o in gc.get_objects() if isinstance(o, _CheckpointFrame))
        gradients(Stack(closing=True, layers=2))
        assert [o for o in gc.get_objects() if isinstance(o, _CheckpointFrame) and o not in before] == []
    finally:
        gc.enable()


def test_threads_hand_over_their_own_tapes() -> None:
    model = Stack(closing=True, layers=2)
    inputs = [tokens().mul(scale) for scale in (1.0, 0.5, 0.25)]

    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(model(leaf).square().sum(), leaf)[0]

    expected = [gradient(x) for x in inputs]
    with ThreadPoolExecutor(3) as pool:
        actual = list(pool.map(gradient, inputs * 3))
    assert_same_bits(actual, expected * 3)
    assert set(verdicts()) == {"hand-off"}


def test_a_region_is_named_by_its_module_or_function() -> None:
    layer = Stack(closing=True).layers[0]

    def body(x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    for run in (layer, layer.forward, functools.partial(layer.forward), body):
        checkpoint(run, tokens().requires_grad_(), use_reentrant=False).sum().backward()
    names = [decision.region.rpartition(".")[2] for decision in ple_gdn.tape_decisions()]
    assert names == ["Layer", "Layer", "Layer", "body"]


def test_a_plain_call_and_an_inference_call_decide_nothing() -> None:
    gradients(Stack(closing=True, checkpointed=False))
    with torch.no_grad():
        Stack(closing=True)(tokens())
    assert ple_gdn.tape_decisions() == []
