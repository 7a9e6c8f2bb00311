"""Grouped RMSNorm: bits of eager, a float64 oracle, opcheck, compile, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles import gated_residual as oracle
from oracles.gated_residual import mismatches

import ple_gdn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = torch.ops.ple_gdn


def inputs(rows: tuple[int, ...], width: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> tuple:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(*rows, width, generator=generator).to(x_dtype).requires_grad_()
    weight = torch.randn(width, generator=generator).to(w_dtype).requires_grad_()
    return x, weight


@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(itertools.product(DTYPES, repeat=2)))
def test_output_and_gradients_have_the_bits_of_eager(x_dtype, w_dtype):
    for rows, groups, size in [((1,), 4, 64), ((17,), 3, 96), ((2, 5), 1, 80), ((), 2, 32), ((257,), 4, 64)]:
        x, weight = inputs(rows, groups * size, x_dtype, w_dtype)
        actual = ple_gdn.grouped_rms_norm(x, weight, group_size=size)
        expected = oracle.grouped_rms_norm(x, weight, size)
        assert mismatches(actual, expected) == 0
        dy = torch.randn(expected.shape).to(x_dtype)
        ours = torch.autograd.grad(actual, (x, weight), dy)
        theirs = torch.autograd.grad(expected, (x, weight), dy)
        assert [mismatches(a, b) for a, b in zip(ours, theirs, strict=True)] == [0, 0]


def test_fp32_agrees_with_a_float64_oracle():
    x, weight = inputs((33,), 4 * 96, torch.float32, torch.float32)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    groups = wide[0].unflatten(-1, (4, 96))
    expected = (groups * (groups.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten(-2) * (1 + wide[1])
    actual = ple_gdn.grouped_rms_norm(x, weight, group_size=96)
    dy = torch.randn(x.shape)
    pairs = [(actual, expected)]
    pairs += zip(
        torch.autograd.grad(actual, (x, weight), dy),
        torch.autograd.grad(expected, wide, dy.double()),
        strict=True,
    )
    for ours, theirs in pairs:
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


@pytest.mark.parametrize("rows", [(), (0,), (0, 3)])
def test_leading_dimensions_may_be_absent_or_empty(rows):
    x, weight = inputs(rows, 64, torch.bfloat16, torch.float32)
    y = ple_gdn.grouped_rms_norm(x, weight, group_size=32)
    assert y.shape == x.shape
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert dx.shape == x.shape
    if 0 in rows:
        assert dweight.count_nonzero() == 0


def test_strided_input_and_expanded_gradient_have_the_bits_of_eager():
    x, weight = inputs((64,), 64, torch.bfloat16, torch.float32)
    for value in (x.detach().t().requires_grad_(), x.detach()[::2].requires_grad_()):
        y, expected = ple_gdn.grouped_rms_norm(value, weight, group_size=32), oracle.grouped_rms_norm(value, weight, 32)
        assert y.is_contiguous()
        assert mismatches(y, expected) == 0
        dy = torch.tensor(0.5).bfloat16().expand(y.shape)
        ours = torch.autograd.grad(y, (value, weight), dy)
        theirs = torch.autograd.grad(expected, (value, weight), dy)
        assert mismatches(ours[0], theirs[0]) == 0
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)


def test_opcheck():
    for rows, x_dtype, w_dtype in [((5,), torch.bfloat16, torch.float32), ((2, 3), torch.float32, torch.float16)]:
        x, weight = inputs(rows, 64, x_dtype, w_dtype)
        torch.library.opcheck(OPS.grouped_rms_norm.default, (x, weight), {"group_size": 32})
        args = (torch.randn_like(x), x.detach(), weight.detach())
        torch.library.opcheck(OPS.grouped_rms_norm_backward.default, args, {"group_size": 32, "eps": 1e-5})
    torch.library.opcheck(OPS.grouped_rms_norm.default, (torch.zeros(32, 4).t(), torch.zeros(32)), {"group_size": 16})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph_with_the_same_bits(dynamic):
    x, weight = inputs((9,), 64, torch.bfloat16, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(ple_gdn.grouped_rms_norm, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    y, expected = compiled(x, weight, group_size=32), oracle.grouped_rms_norm(x, weight, 32)
    assert mismatches(y, expected) == 0
    dy = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(out, (x, weight), dy) for out in (y, expected))
    assert [mismatches(a, b) for a, b in zip(ours, theirs, strict=True)] == [0, 0]


def test_double_backward_raises():
    x, weight = inputs((3,), 64, torch.float32, torch.float32)
    y = ple_gdn.grouped_rms_norm(x, weight, group_size=32)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.square().sum().backward()


@pytest.mark.parametrize(
    ("x", "weight", "group_size", "error", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(8), 3, ValueError, "group_size: expected a positive divisor"),
        (torch.zeros(2, 8), torch.zeros(8), 0, ValueError, "group_size: expected a positive divisor"),
        (torch.zeros(2, 8), torch.zeros(8), 4.0, TypeError, "group_size: expected an int, got float"),
        (torch.zeros(2, 8), torch.zeros(4), 4, ValueError, "weight: expected shape"),
        (torch.zeros(2, 8), torch.zeros(1, 8), 4, ValueError, "weight: expected shape"),
        (torch.zeros(()), torch.zeros(8), 4, ValueError, "x: expected at least 1 dimension"),
        (torch.zeros(2, 8).int(), torch.zeros(8), 4, TypeError, "x: expected dtype"),
        (torch.zeros(2, 8), torch.zeros(8).double(), 4, TypeError, "weight: expected dtype"),
        (torch.zeros(2, 8), torch.zeros(8, device="meta"), 4, ValueError, "weight: expected device"),
        (torch.zeros(2, 8), None, 4, TypeError, "weight: expected a torch.Tensor"),
    ],
)
def test_bad_input_is_named(x, weight, group_size, error, message):
    with pytest.raises(error, match=message):
        ple_gdn.grouped_rms_norm(x, weight, group_size=group_size)
