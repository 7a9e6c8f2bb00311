"""Tape reuse in compiled graphs of unusual regions: nested, shared, selective; and the peak over depth."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from oracles.regions import Gdn, Stack, T, W, tokens
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ple_gdn.explain import read_backward
from ple_gdn.memory import _walk

pytestmark = pytest.mark.usefixtures("one_thread")

RULE, TAPES, BACKWARD = "gated_delta_rule", "gated_delta_rule_tapes", "gated_delta_rule_backward"


def _policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    mine = op is torch.ops.ple_gdn.gated_delta_rule.default
    return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE


_selective = functools.partial(create_selective_checkpoint_contexts, _policy)
region = functools.partial(checkpoint, use_reentrant=False)

# name -> (layer and x -> region, sorted verdicts, our ops of the backward graph)
REGIONS: dict[str, tuple[Callable, list[str], list[str]]] = {
    "one module in two regions": (
        lambda layer, x: region(layer, region(layer, x)),
        ["hand-off", "hand-off"],
        [TAPES, BACKWARD] * 2,
    ),
    "one module twice in a region": (
        lambda layer, x: region(lambda t: layer(layer(t)), x),
        ["hand-off", "replay"],
        [RULE, TAPES, BACKWARD, BACKWARD],
    ),
    "nested, closed": (
        lambda layer, x: region(lambda t: region(layer, t.sin()), x),
        ["hand-off"],
        [TAPES, BACKWARD],
    ),
    "nested, a saver behind": (
        lambda layer, x: region(lambda t: region(layer, t.sin()).sin(), x),
        ["replay"],
        [RULE, BACKWARD],
    ),
    "selective, the rule kept": (lambda layer, x: region(layer, x, context_fn=_selective), ["saved"], [BACKWARD]),
}


class Whole(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.run = Gdn(), REGIONS[name][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layer, x)


@pytest.mark.parametrize("name", REGIONS)
def test_verdicts_and_ops_of_unusual_regions(name: str) -> None:
    _, verdicts, ops = REGIONS[name]
    text = lambda gm: re.findall(r"ple_gdn\.(gated_delta_rule\w*)\.default", str(gm.graph))  # noqa: E731
    report, (called,) = read_backward(Whole(name), (tokens(),), {}, None, text)
    assert not report.failures
    assert sorted(t.verdict for t in report.tapes) == verdicts
    assert called == ops


@pytest.mark.parametrize("name", [n if "twice" in n else pytest.param(n, marks=pytest.mark.slow) for n in REGIONS])
def test_gradients_of_unusual_regions_are_those_of_eager(name: str) -> None:
    model = Whole(name)
    grads = []
    for run in (model, torch.compile(model, backend="ple_gdn", fullgraph=True)):
        (grad,) = torch.autograd.grad(run(tokens()).square().sum(), model.layer.proj.weight)
        grads.append(grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("closing", [True, False])
def test_the_peak_beyond_layer_inputs_and_gradients_stays_one_layer_s_working_set(closing: bool) -> None:
    peaks = {}
    for layers in (1, 2, 4):
        model = Stack(closing, layers)
        _, (steps,) = read_backward(model, (tokens(),), {}, None, lambda gm: list(_walk(gm.graph)))
        peaks[layers] = max(size for _, size in steps)
    boundary = 4 * T * W
    gradients = sum(p.nbytes for p in model.layers[0].parameters())
    for layers, peak in peaks.items():
        assert peak <= peaks[1] + (layers - 1) * max(boundary, gradients), peaks
