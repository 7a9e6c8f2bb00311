"""Every spelling of one operation reads as one term, and reading never edits the graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles.fusing import traced

from ple_gdn.fx_passes.graph_text import graph_text
from ple_gdn.fx_passes.normalize import Term, is_mutation, read_term, value_of

X = torch.randn(2, 6, 8)
SAME = [
    (("mul", 2), [lambda x: x * 2, lambda x: 2 * x, lambda x: x.mul(2), lambda x: torch.multiply(x, other=2)]),
    (("add", 1.0), [lambda x: x + 1.0, lambda x: 1.0 + x, lambda x: torch.add(1.0, x), lambda x: x.add(1.0)]),
    (("div", 4), [lambda x: x / 4, lambda x: x.true_divide(4), lambda x: torch.div(x, 4), lambda x: x.div(4)]),
    (("pow", 2), [lambda x: x**2, lambda x: x.pow(2), lambda x: torch.square(x), lambda x: x.square()]),
    (
        ("clamp_min", 1e-6),
        [
            lambda x: x.clamp_min(1e-6),
            lambda x: x.clamp(min=1e-6),
            lambda x: torch.clip(x, 1e-6),
            lambda x: torch.clamp_min(x, min=1e-6),
        ],
    ),
    (
        ("mean", -1, True, None),
        [
            lambda x: x.mean(-1, keepdim=True),
            lambda x: torch.mean(x, -1, True),
            lambda x: x.mean(dim=-1, keepdim=True, dtype=None),
            lambda x: x.mean(axis=-1, keepdim=True),
        ],
    ),
    (("sigmoid",), [torch.sigmoid, F.sigmoid, lambda x: x.sigmoid(), torch.nn.Sigmoid(), torch.special.expit]),
    (("silu", False), [F.silu, torch.nn.SiLU(), lambda x: torch.ops.aten.silu(x), torch.ops.aten.silu.default]),
    (
        ("view",),
        [
            lambda x: x.view(12, 8),
            lambda x: x.reshape(-1, 2, 4),
            lambda x: torch.flatten(x, -2),
            lambda x: torch.unflatten(x, -1, (2, 4)),
            lambda x: x[:, None],
            lambda x: x[..., None],
            lambda x: x.unsqueeze(0).squeeze(0),
            lambda x: x[:, 0:],
            lambda x: x[..., -8:],
            torch.nn.Unflatten(-1, (2, 4)),
        ],
    ),
    (
        ("cast",),
        [
            lambda x: x.half(),
            lambda x: x.to(torch.bfloat16),
            lambda x: x.type(torch.float16),
            lambda x: x.type_as(torch.ones(1, dtype=torch.bfloat16)),
            lambda x: x.to(dtype=torch.bfloat16),
        ],
    ),
    (
        ("permute", (0, 2, 1)),
        [
            lambda x: x.transpose(1, 2),
            lambda x: torch.swapaxes(x, -1, -2),
            lambda x: x.permute(0, 2, 1),
            lambda x: x.permute((0, -1, 1)),
            lambda x: x.mT,
        ],
    ),
    (("slice", 1, slice(1, None, None)), [lambda x: x[:, 1:], lambda x: x[:, 1:, :], lambda x: x[..., 1:, :]]),
    (
        ("opaque",),
        [
            lambda x: x.view(torch.int32),
            lambda x: x[:, 0],
            lambda x: x[:, ::2],
            lambda x: x.clamp(0.1, 0.5),
            lambda x: torch.sin(x),
            lambda x: F.silu(x.clone(), inplace=True),
            lambda x: x.clone().mul_(2),
        ],
    ),
]
CASES = [(expected, i, fn) for expected, fns in SAME for i, fn in enumerate(fns)]


def last_term(fn) -> Term:
    gm = traced(fn, X)
    return read_term(next(node for node in reversed(gm.graph.nodes) if node.op.startswith("call")))


@pytest.mark.parametrize(("expected", "fn"), [(e, f) for e, _, f in CASES], ids=[f"{e[0]} {i}" for e, i, _ in CASES])
def test_spellings_of_one_operation_read_as_one_term(expected, fn):
    term = last_term(fn)
    assert term.op == expected[0]
    rest = tuple(arg for arg in term.args if not isinstance(arg, torch.fx.Node))
    wanted = expected[1:] if expected[0] != "add" else (*expected[1:], 1)  # alpha
    assert rest[: len(wanted)] == wanted


def test_a_default_and_a_named_argument_bind_in_the_order_of_aten():
    term = last_term(lambda x: F.conv1d(x, weight=torch.ones(6, 1, 3), groups=6, dilation=2))
    assert term.op == "conv1d"
    assert term.args[2:] == (None, 1, 0, 2, 6)


def writes(x):
    y = x.clone()
    y.add_(1)
    y += 1
    y[0] = 0
    torch.relu_(y)
    torch.mul(x, 2, out=y)
    return F.silu(y, inplace=True)


def test_every_write_is_seen():
    calls = [node for node in traced(writes, X).graph.nodes if node.op.startswith("call")]
    assert [is_mutation(node) for node in calls] == [False, *[True] * (len(calls) - 1)]
    assert len(calls) == 7


def test_reading_leaves_the_graph_as_it_came():
    gm = traced(lambda x: (x.view(12, 8).float() * 2).sigmoid().mean(-1), X)
    before = graph_text(gm)
    for node in gm.graph.nodes:
        read_term(node)
    assert graph_text(gm) == before


def test_no_op_slices_of_a_symbolic_length_add_no_guard():
    x = torch.randn(2, 6, 8)
    torch._dynamo.mark_dynamic(x, 1)
    gm = traced(lambda x: F.pad(x, (0, 0, 3, 0))[:, -(3 + x.shape[1]) :], x)
    last = next(node for node in reversed(gm.graph.nodes) if value_of(node) is not None)
    guards = len(value_of(last).fake_mode.shape_env.guards)
    assert read_term(last).op == "view"
    assert len(value_of(last).fake_mode.shape_env.guards) == guards
