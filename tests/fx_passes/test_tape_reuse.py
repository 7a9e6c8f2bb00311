"""Where a checkpointed gated delta rule's backward gets its tapes: graphs, reasons, bits."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from oracles.regions import HV, H, K, Stack, T, V, W, tokens

import ple_gdn
from ple_gdn.explain import read_backward


def count(text: str, op: str) -> int:
    return len(re.findall(rf"ple_gdn\.{op}\.default\(", text))


def traced(model: torch.nn.Module, **options):
    graphs = ple_gdn.capture_graphs(model, tokens(), options=options or None)
    report = ple_gdn.explain(model, tokens(), options=options or None)
    assert not report.failures, report
    return graphs.forward[0], graphs.backward[0], report.tapes


@pytest.mark.parametrize("layers", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
def test_a_region_with_later_savers_replays_and_reruns_only_the_output(layers):
    forward, backward, tapes = traced(Stack(closing=False, layers=layers))
    assert [t.verdict for t in tapes] == ["replay"] * layers
    assert all("reads" in t.reason for t in tapes)
    assert count(forward, "gated_delta_rule") == layers
    assert count(backward, "gated_delta_rule") == layers
    assert "save_mode='none'" in backward
    assert count(backward, "gated_delta_rule_tapes") == 0
    assert count(backward, "gated_delta_rule_backward") == layers


@pytest.mark.parametrize("layers", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
def test_a_region_closed_by_the_rule_hands_off_beside_the_reader_without_rerunning_the_output(layers):
    forward, backward, tapes = traced(Stack(closing=True, layers=layers))
    assert [t.verdict for t in tapes] == ["hand-off"] * layers
    assert count(forward, "gated_delta_rule") == layers
    assert count(backward, "gated_delta_rule") == 0
    calls = re.findall(r"ple_gdn\.(gated_delta_rule_\w+)\.default\(", backward)
    assert calls == ["gated_delta_rule_tapes", "gated_delta_rule_backward"] * layers


@pytest.mark.parametrize("closing", [True, False])
def test_no_tape_outlives_its_reader_and_nothing_stands_between_them(closing):
    _, (graph,) = read_backward(Stack(closing=closing, layers=2), (tokens(),), {}, None, lambda gm: gm.graph)
    nodes = list(graph.nodes)
    ops = torch.ops.ple_gdn
    readers = [node for node in nodes if node.target is ops.gated_delta_rule_backward.default]
    assert len(readers) == 2
    for reader in readers:
        tapes = [tape for tape in reader.args[11:] if tape.meta["val"].numel()]
        assert len(tapes) == (6 if closing else 0)
        for tape in tapes:
            maker = tape.args[0]
            assert maker.target is ops.gated_delta_rule_tapes.default
            assert list(tape.users) == [reader]
            between = nodes[nodes.index(maker) + 1 : nodes.index(reader)]
            assert all(node.target is operator.getitem for node in between)
    rules = [node for node in nodes if node.target is ops.gated_delta_rule.default]
    assert len(rules) == (0 if closing else 2)
    for rule in rules:
        assert rule.kwargs["save_mode"] == "none"
        assert sum(value.numel() for value in rule.meta["val"][2:]) == 0


def test_a_reader_outside_the_region_that_the_backward_reruns_is_seen():
    class Read(torch.nn.Module):
        def __init__(self, after) -> None:
            super().__init__()
            self.stack, self.after = Stack(closing=True), after

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.stack(x))

    for after, verdict in ((lambda y: y * 2, "hand-off"), (torch.sin, "replay"), (torch.nn.Linear(W, 3), "replay")):
        _, backward, tapes = traced(Read(after))
        assert [t.verdict for t in tapes] == [verdict]
        assert count(backward, "gated_delta_rule") == (verdict == "replay")


def test_no_tape_is_among_what_a_checkpointed_forward_saves():
    for closing in (False, True):
        forward, _, _ = traced(Stack(closing=closing))
        returned = forward[forward.rindex("return") :]
        rule = re.search(r"(\w+)(?:: [^=]+)? = ple_gdn\.gated_delta_rule\.default", forward).group(1)
        tapes = re.findall(rf"(getitem\w*)(?:: [^=]+)? = operator\.getitem\({rule}, [2-7]\)", forward)
        assert not [tape for tape in tapes if re.search(rf"\b{tape}\b", returned)]


def test_options_and_arguments_force_either_form():
    assert [t.verdict for t in traced(Stack(closing=True), tape_reuse="replay")[2]] == ["replay"]
    assert [t.verdict for t in traced(Stack(closing=False), tape_reuse="hand_off")[2]] == ["hand-off"]
    assert [t.verdict for t in traced(Stack(closing=True, reuse=False))[2]] == ["replay"]
    # a call's own argument wins over the option
    assert [t.verdict for t in traced(Stack(closing=True, reuse=False), tape_reuse="hand_off")[2]] == ["replay"]


def test_without_a_checkpoint_the_save_mode_stands_and_a_budget_keeps_what_fits():
    model = Stack(closing=False, layers=3, checkpointed=False)
    forward, backward, tapes = traced(model)
    assert [t.verdict for t in tapes] == ["saved"] * 3
    assert "save_mode='full'" not in forward
    assert count(backward, "gated_delta_rule") == 0
    chunks = -(-T // 64)
    light = 3 * (4 * T * (HV + 2 * H + HV * 64) + 4 * HV * K * V)  # with a start state each
    extra = 4 * (chunks * HV * K * V + T * HV * V)
    for fitting in (0, 1, 2, 3):
        forward, _, tapes = traced(model, memory_budget=light + fitting * extra)
        assert forward.count("save_mode='full'") == fitting, tapes
    assert traced(model, memory_budget=light + 3 * extra - 1)[0].count("save_mode='full'") == 2


def gradients(model: torch.nn.Module, backend: str | None, options: dict | None = None) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model.zero_grad()
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True, options=options)
    run(tokens()).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("closing", [False, True])
def test_all_forms_give_the_same_gradient_bits(closing):
    compiled = [gradients(Stack(closing, 1, reuse=reuse), "ple_gdn") for reuse in (True, False, "auto")]
    eager = gradients(Stack(closing, 1), None)
    for other in compiled[1:]:
        assert all(torch.equal(a, b) for a, b in zip(compiled[0], other, strict=True))
    for a, b in zip(compiled[0], eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
