"""Steps through checkpoint regions, and what was decided and run in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.utils.checkpoint import checkpoint

import ple_gdn
from oracles.op_log import OpLog
from oracles.regions import HV, H, K, Stack, T, V, tokens

HANDED = ["gated_delta_rule_tapes", "gated_delta_rule_backward"]
REPLAYED = ["gated_delta_rule", "gated_delta_rule_backward"]
CHUNKS = -(-T // 64)
SMALL = 4 * T * (HV + 2 * H + HV * 64)
LIGHT = SMALL + 4 * HV * K * V  # one start state
FULL = SMALL + 4 * (CHUNKS * HV * K * V + T * HV * V)


def verdicts() -> list[str]:
    return [decision.verdict for decision in ple_gdn.tape_decisions()]


def only_decision() -> ple_gdn.TapeDecision:
    assert len(ple_gdn.tape_decisions()) == 1, ple_gdn.tape_decisions()
    return ple_gdn.last_tape_decision()


def step(model: Callable, x: torch.Tensor | None = None, backward_context=None, **keywords) -> OpLog:
    """Forward and backward; the log of the backward."""
    y = model(tokens().requires_grad_() if x is None else x)
    y = y[0] if isinstance(y, tuple) else y
    with OpLog() as log, backward_context or nullcontext():
        y.square().sum().backward(**keywords)
    return log


def gradients(model: torch.nn.Module, run: Callable | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    x = tokens().requires_grad_()
    (run or model)(x).square().sum().backward()
    assert x.grad.abs().max() > 1e-5, "a gradient that vanishes tells nothing"
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def assert_same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def region(model: Stack, **keywords) -> Callable:
    """The stack's one layer under a checkpoint with these arguments."""
    return lambda x: checkpoint(model.layers[0], x, **{"use_reentrant": False, **keywords})
