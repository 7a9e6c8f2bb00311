"""Compiled ops have eager's bits: every 16-bit code, neighbours that Inductor fuses in, fp32 left alone.

Inductor's C++ compiles take seconds, so a few graphs carry many checks.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from oracles import gated_residual as oracle
from oracles.gated_residual import all_codes, mismatches
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import ple_gdn
from ple_gdn.lowerings import register_lowerings, rounding

aten = torch.ops.aten
LOW = (torch.bfloat16, torch.float16)
ROUNDED_ADD = rounding.rounded_op(aten.add.Tensor)


@pytest.fixture(autouse=True)
def fresh_inductor(monkeypatch):
    register_lowerings()
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


def rand(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def run(fn, args: tuple, upstream: list[torch.Tensor]) -> list[torch.Tensor]:
    outs = fn(*args)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return [*outs, *torch.autograd.grad(outs, leaves, upstream)]


def compare(compiled, eager, args: tuple) -> list[int]:
    upstream = [torch.randn_like(out) for out in eager(*args)]
    return [mismatches(a, b) for a, b in zip(run(compiled, args, upstream), run(eager, args, upstream), strict=True)]


def all_ops(ops, streams: int, x, up, normed, hidden, hyper, weights) -> tuple:
    down = ops.gated_residual_down if ops is ple_gdn else ops.down
    mix = ops.gated_residual_mix if ops is ple_gdn else ops.mix
    inject = ops.gated_residual_inject if ops is ple_gdn else ops.inject
    return down(x, streams), mix(up, normed, streams), inject(hidden, hyper, weights)


@pytest.mark.parametrize(
    "streams", [4, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", LOW)
def test_every_16_bit_code_through_the_compiled_ops_has_the_bits_of_eager(dtype, streams):
    width = 1024 - 1024 % streams
    codes = [all_codes(dtype).roll(shift).reshape(64, 1024)[:, :width].clone().requires_grad_() for shift in (0, 7, 99)]
    args = (
        *codes,
        rand(64, width // streams, dtype=dtype),
        rand(64, width, dtype=dtype),
        rand(64, streams, dtype=dtype),
    )
    compiled = torch.compile(lambda *a: all_ops(ple_gdn, streams, *a), fullgraph=True)
    *rest, dweights = compare(compiled, lambda *a: all_ops(oracle, streams, *a), args)
    assert rest == [0] * 8
    assert dweights <= 1  # a sum over the width: one unit in the last place, below 1 % of 64 x streams


@pytest.mark.parametrize("dtype", LOW)
def test_every_16_bit_code_through_each_rounded_op_has_the_bits_of_eager(dtype):
    codes = all_codes(dtype)
    other = torch.randn(codes.shape).to(dtype)
    calls = [
        (aten.sigmoid.default, (codes,)),
        (aten.silu.default, (codes,)),
        (aten.sigmoid_backward.default, (other, codes)),
        (aten.sigmoid_backward.default, (codes, other)),
        (aten.silu_backward.default, (other, codes)),
        (aten.silu_backward.default, (codes, other)),
        (aten.mul.Tensor, (codes, other)),
        (aten.add.Tensor, (codes, other)),
        (aten.div.Tensor, (codes, 3)),
        (aten.div.Tensor, (codes, 4)),
        (aten.neg.default, (codes,)),
    ]
    ops = [rounding.rounded_op(target, *args) for target, args in calls]

    def fn(*tensors):
        # Each result is stored and read again in fp32, which is where an unrounded value would show.
        pairs = zip(ops, [a for _, a in calls], strict=True)
        results = [op(*[tensors[0] if v is codes else tensors[1] if v is other else v for v in a]) for op, a in pairs]
        return (*results, *[r.float() * 1.25 for r in results])

    eager = [target(*args) for target, args in calls]
    expected = [*eager, *[r.float() * 1.25 for r in eager]]
    actual = torch.compile(fn, fullgraph=True)(codes, other)
    assert [mismatches(a, b) for a, b in zip(actual, expected, strict=True)] == [0] * len(expected)


def neighbours(ops, x, delta, up, weight, linear):
    """An add before, a norm and a linear after, the mix read twice, all inside a checkpoint."""
    mix = ops.gated_residual_mix if ops is ple_gdn else ops.mix

    def region(x, delta, up):
        normed = x + delta if ops is oracle else ROUNDED_ADD(x, delta)
        mixed = mix(up, normed, 4)
        scaled = F.rms_norm(mixed.float(), (mixed.shape[-1],), weight)
        return mixed, scaled, F.linear(mixed, linear), mixed.float() + 1.0

    return checkpoint(region, x, delta, up, use_reentrant=False)


def test_neighbours_fused_in_front_and_behind_do_not_change_the_bits():
    compiled = torch.compile(lambda *a: neighbours(ple_gdn, *a), fullgraph=True, dynamic=True)
    weight, linear = torch.ones(96), torch.randn(8, 96).bfloat16()
    for rows in (17, 257, 2731):  # 2731 rows of 4 x 96: more than 10**6 elements
        args = [torch.randn(rows, 4 * 96).bfloat16() for _ in range(3)]
        actual, expected = compiled(*args, weight, linear), neighbours(oracle, *args, weight, linear)
        counts = [mismatches(a, b) for a, b in zip(actual, expected, strict=True)]
        assert counts[0] == counts[2] == counts[3] == 0
        torch.testing.assert_close(actual[1], expected[1], rtol=1e-6, atol=1e-6)


def test_without_the_rounding_helper_the_bits_differ(monkeypatch):
    monkeypatch.setattr(rounding, "round_value", lambda value, dtype, device: value)
    compiled = torch.compile(lambda *a: (ple_gdn.gated_residual_mix(*a, 4),), fullgraph=True)
    counts = compare(
        compiled, lambda *a: (oracle.mix(*a, 4),), tuple(rand(17, 256, dtype=torch.bfloat16) for _ in "un")
    )
    assert min(counts) > 100


def test_fp32_has_no_rounding_and_the_bits_of_plain_inductor():
    args = tuple(rand(17, w, dtype=torch.float32) for w in (96, 256, 256, 64, 256, 4))
    upstream = [torch.randn_like(out) for out in all_ops(oracle, 4, *args)]
    ours, code = run_and_get_code(run, torch.compile(lambda *a: all_ops(ple_gdn, 4, *a)), args, upstream)
    plain = run(torch.compile(lambda *a: all_ops(oracle, 4, *a)), args, upstream)
    assert not any(word in text for text in code for word in ("bfloat16", "half", "float16"))
    assert [mismatches(a, b) for a, b in zip(ours, plain, strict=True)] == [0] * len(plain)


def test_a_rounded_op_outside_inductor_is_the_aten_op():
    x = torch.randn(8, 8).bfloat16()
    op = rounding.rounded_op(aten.div.Tensor, x, 3)
    assert op is rounding.rounded_op(aten.div.Tensor, x, 4)
    assert op is not rounding.rounded_op(aten.div.Tensor, x, x)
    assert mismatches(op(x, 3), x / 3) == 0
    assert op(x.to("meta"), 3).shape == x.shape


WIDEN = rounding.rounded_op(torch.ops.prims.convert_element_type.default, torch.zeros(1), torch.float32)


@pytest.mark.parametrize(("terms", "readers", "stored"), [(3, 2, True), (2, 2, False), (3, 1, False)])
def test_a_value_of_three_buffers_that_two_readers_widen_is_stored_in_16_bits(terms, readers, stored):
    def fn(small, *values):
        wide = WIDEN(functools.reduce(ROUNDED_ADD, values, small), torch.float32)
        return [wide.sum(dim) for dim in range(readers)]

    args = [torch.randn(1 if i == 0 else 64, 64).bfloat16() for i in range(terms + 1)]
    graph = GraphLowering(make_fx(fn, tracing_mode="fake")(*args))
    with V.set_graph_handler(graph):
        graph.run(*args)
    assert (torch.bfloat16 in [buffer.get_dtype() for buffer in graph.buffers]) == stored
