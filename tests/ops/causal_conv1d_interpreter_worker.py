"""Run with TRITON_INTERPRET=1: the CUDA launchers of `causal_conv1d` on CPU tensors, checked case by case."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracles.causal_conv1d import conv_packed

from ple_gdn.ops.causal_conv1d import launch
from ple_gdn.ops.causal_conv1d.reference import causal_conv1d_backward_reference, causal_conv1d_reference

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# batch, tokens, width, kernel, cu_seqlens, dtype of x, dtype of the weight, activation, bias
CASES = (
    (1, 40, 17, 4, [0, 5, 5, 6, 30, 38], FP32, FP32, "silu", True),
    (2, 13, 24, 4, None, FP16, FP16, "silu", True),
    (2, 2, 8, 4, None, FP32, FP32, None, False),
    (1, 7, 8, 1, None, FP32, FP32, "silu", True),
    (1, 24, 33, 6, [0, 3, 24], FP32, FP32, None, True),
    (1, 9, 8, 4, list(range(10)), FP16, FP16, "silu", False),
    (1, 12, 8, 3, [0, 12, 12], FP16, FP32, "silu", True),
    (1, 12, 8, 3, [0], FP32, FP32, "silu", True),
    (3, 5, 8, 2, None, FP32, FP16, "silu", False),
)


def tensors(case: tuple) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    batch, tokens, width, kernel, boundaries, dtype, weight_dtype, _, with_bias = case
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, tokens, width), (width, kernel), (width,), (batch, tokens, width)]
    x, weight, bias, dy = (torch.randn(s, generator=generator) for s in shapes)
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries)
    return x.to(dtype), weight.to(weight_dtype), bias.to(weight_dtype) if with_bias else None, dy.to(dtype), cu_seqlens


def run(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, cu: Tensor | None, activation: str | None) -> list:
    y = launch.launch_forward(x, weight, bias, cu, activation)
    return [y, *launch.launch_backward(dy, x, weight, bias, cu, activation)]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def check_case(case: tuple) -> None:
    """float64 within the dtype's rounding; the reference's bits where both dtypes are 16-bit."""
    boundaries, activation = case[4], case[7]
    x, weight, bias, dy, cu = tensors(case)
    got = run(x, weight, bias, dy, cu, activation)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    want = conv_packed(leaves[0], leaves[1], leaves[2] if bias is not None else None, activation, boundaries)
    bar = 1e-6 if case[5] == case[6] == FP32 else 2e-3
    exact = (want.detach(), *torch.autograd.grad(want, leaves, dy.double())) if want.requires_grad else ()
    for actual, expected in zip(got, exact, strict=False):
        assert actual.is_contiguous()
        assert relative(actual, expected) <= bar, (case, relative(actual, expected))
    reference = (
        causal_conv1d_reference(x, weight, bias, cu, activation),
        *causal_conv1d_backward_reference(dy, x, weight, bias, cu, activation),
    )
    for actual, expected in zip(got, reference, strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        if case[5] == case[6] == FP16:
            assert torch.equal(actual, expected), case


def check_documents_alone() -> None:
    """A document has the bits it has alone; NaN and infinity of others and of rows of no document stay away."""
    case = (1, 40, 8, 4, [0, 5, 6, 30, 38], FP32, FP32, "silu", True)
    x, weight, bias, dy, cu = tensors(case)
    packed = run(x, weight, bias, dy, cu, "silu")
    for start, stop in itertools.pairwise(case[4]):
        alone = run(x[:, start:stop], weight, bias, dy[:, start:stop], None, "silu")
        assert all(torch.equal(a[:, start:stop], b) for a, b in zip(packed[:2], alone[:2], strict=True))
    for rows in (slice(6, 30), slice(38, 40)):
        spoiled, dirty = x.clone(), dy.clone()
        spoiled[:, rows], dirty[:, rows] = float("nan"), float("inf")
        actual = run(spoiled, weight, bias, dirty, cu, "silu")
        for a, b in zip(actual[:2], packed[:2], strict=True):
            assert torch.equal(a[:, : rows.start], b[:, : rows.start])
            assert torch.equal(a[:, rows.stop :], b[:, rows.stop :])
    assert all(torch.equal(a, b) for a, b in zip(actual, packed, strict=True))


def check_layouts() -> None:
    """Transposed, sliced and expanded tensors, whose rows are walked in place where channels are unit-stride."""
    x, weight, bias, dy, _ = tensors((2, 13, 24, 4, None, FP32, FP32, "silu", True))
    want = run(x, weight, bias, dy, None, "silu")
    wide = torch.full((2, 13, 60), float("nan"))
    wide[..., 7:31] = x
    strided = torch.stack([weight] * 2, -1)[..., 0]
    rows_first = dy.transpose(0, 1).contiguous().transpose(0, 1)
    for layout in ((wide[..., 7:31], strided, rows_first), (x.mT.contiguous().mT, weight, dy.mT.contiguous().mT)):
        got = run(layout[0], layout[1], bias, layout[2], None, "silu")
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ones = run(x, weight, bias, torch.ones_like(dy), None, "silu")
    got = run(x, weight, bias, torch.ones(()).expand_as(dy), None, "silu")
    assert all(torch.equal(a, b) for a, b in zip(got, ones, strict=True))


def steps_from_zero(x: Tensor) -> Tensor:
    code = x.view(torch.int16).int()
    return torch.where(code < 0, -(code & 0x7FFF), code)


def check_values() -> None:
    """A sixteenth of the 16-bit values, all from 64 to 128, and fp32 at the ends of exp, through one tap of 1, even
    where exp(-y) is 1e38: the reference's bits but for a rounding step of exp2 and the reciprocal. fp32 rounds
    log2(e) y, 127 there, by 4e-6."""
    ends = torch.cat([torch.linspace(86, 104, 256), 2.0 ** torch.arange(-149, 128)])
    codes = torch.arange(-32768, 32768).to(torch.int16)
    for values in (codes.view(BF16), codes.view(FP16), torch.cat([ends, -ends])):
        near = (values.abs() >= 64) & (values.abs() <= 128)
        values = values[values.isfinite() & (near | (torch.arange(len(values)) % 16 == 0) | (values.dtype == FP32))]
        if values.dtype == BF16:  # whose subnormal values the interpreter loads wrong
            values = values[values.abs() >= 2.0**-125]
        x = values[: len(values) // 8 * 8].reshape(1, 8, -1)
        weight, dy = torch.ones(x.shape[2], 1, dtype=x.dtype), torch.ones_like(x)
        got = run(x, weight, None, dy, None, "silu")
        want = causal_conv1d_reference(x, weight, None, None, "silu")
        slopes, *_ = causal_conv1d_backward_reference(dy, x, weight, None, None, "silu")
        for actual, expected in ((got[0], want), (got[1], slopes)):
            if x.dtype == FP32:
                assert ((actual - expected).abs() <= 4e-6 * expected.abs() + 1e-44).all()
            else:
                apart = (steps_from_zero(actual) - steps_from_zero(expected)).abs()
                assert apart.max() <= 1, (x.dtype, x.view(-1)[apart.argmax()], actual.view(-1)[apart.argmax()])
                # The interpreter rounds to BF16 in a way of its own.
                assert x.dtype == BF16 or (apart > 0).sum() <= 8


def check_bad_boundaries() -> None:
    """Boundaries whose values the host does not read are found bad on the device."""
    x, weight = torch.randn(1, 20, 8), torch.randn(8, 3)
    for values in ([0, 12, 7, 20], [1, 20], [0, 21], [-3, 20], [0, 2**31]):
        cu = torch.tensor(values)
        p = launch.Problem(x, weight, None)
        p.set_boundaries(cu)
        assert p.healthy.item() == 0, values


if __name__ == "__main__":
    torch.set_num_threads(1)
    launch.MINIMUM_SPAN = 8  # several spans on a few rows
    for each in CASES:
        check_case(each)
    check_documents_alone()
    check_layouts()
    check_bad_boundaries()
    check_values()
