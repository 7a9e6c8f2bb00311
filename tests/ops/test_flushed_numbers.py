"""Functions at the ends of fp32, in compiled PTX: what `.ftz` instructions make zero, the hardware makes zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from oracles.ptx_machine import THREADS, Machine, Memory  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

from ple_gdn.ops.ple.kernels_backward import _silu_gradient  # noqa: E402
from ple_gdn.ops.ple.kernels_common import _eight_sigmoids, _sigmoid  # noqa: E402
from ple_gdn.ops.triton_rounding import rounded, sigmoid, silu  # noqa: E402

MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit
def ple_kernel(x, y, SIZE: tl.constexpr):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    value = tl.load(x + i)
    z = value * MINUS_LOG2_E
    tl.store(y + i, z * (0.125 * _eight_sigmoids(z)))
    tl.store(y + SIZE + i, _silu_gradient(z) * MINUS_LOG2_E)
    tl.store(y + 2 * SIZE + i, _sigmoid(value))


@triton.jit
def convolution_kernel(x, y, SIZE: tl.constexpr):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    value = tl.load(x + i)
    tl.store(y + i, rounded(silu(value), tl.bfloat16))
    tl.store(y + SIZE + i, sigmoid(value))


@triton.jit
def inductor_kernel(x, y, SIZE: tl.constexpr):
    """The functions as Inductor writes them into a kernel."""
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    value = tl.load(x + i)
    tl.store(y + i, libdevice.tanh(value))
    tl.store(y + SIZE + i, libdevice.rsqrt(value))
    tl.store(y + 2 * SIZE + i, libdevice.ceil(value))
    tl.store(y + 3 * SIZE + i, libdevice.floor(value))
    tl.store(y + 4 * SIZE + i, libdevice.exp2(value))


def run(kernel: object, x: torch.Tensor, results: int, **options: bool) -> torch.Tensor:
    """[results, len(x)] of every fp32 in x; x's length is a multiple of 128."""
    signature = {"x": "*fp32", "y": "*fp32", "SIZE": "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(2,): len(x)})
    options |= {"num_warps": THREADS // 32, "enable_fp_fusion": False}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    memory, y = Memory(), torch.full((results, len(x)), float("nan"))
    machine = Machine(binary.asm["ptx"], 0, memory)
    arguments = [memory.place(x), memory.place(y), 0, 0]
    with np.errstate(all="ignore"):
        for program in range(len(x) // THREADS):
            machine.run(program, arguments)
    return y


def test_ple_s_silu_its_gradient_and_sigmoid_are_those_of_float64_down_to_where_exp_overflows() -> None:
    y = torch.cat([torch.linspace(-88.7, 88.7, 4096), torch.linspace(-88.7, -86.9, 1024)])
    wide = y.double()
    s = wide.sigmoid()
    for got, want in zip(run(ple_kernel, y, 3), (wide * s, s * (1 + wide * (1 - s)), s), strict=True):
        # -88 * 6e-39 is a normal number, of a sigmoid that is none and has 21 bits. silu' has a zero at -1.28.
        assert ((got - want).abs() <= 1e-5 * want.abs() + 1e-7 * s + 1e-45).all()


def test_every_bf16_code_has_atens_silu_and_fp32_its_sigmoid_in_the_convolution() -> None:
    codes = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16).float()
    silus, shares = run(convolution_kernel, codes, 2)
    expected = (codes / (1 + torch.exp(-codes))).bfloat16()
    different = (silus.bfloat16() != expected) & ~(silus.isnan() & expected.isnan())
    assert different.sum() == 0, codes[different]
    want = codes.double().sigmoid()
    held = (codes >= -88.5) & codes.isfinite()
    assert ((shares - want).abs() <= 1e-5 * want + 1e-45)[held].all()


def test_ple_s_functions_at_infinities_and_past_the_range_of_exp() -> None:
    y = torch.tensor([-1e30, -1e4, -104.0, -89.0, 89.0, 1e4, 1e30, -0.0, float("inf"), float("-inf"), float("nan")])
    silu, gradient, sigmoid = run(ple_kernel, torch.cat([y, torch.zeros(-len(y) % 128)]), 3)[:, : len(y)]
    for values in (silu, gradient, sigmoid):
        assert (values[:4] == 0).all()
    torch.testing.assert_close(silu[4:7], y[4:7])
    assert torch.equal(gradient[4:7], torch.ones(3))
    assert torch.equal(sigmoid[4:7], torch.ones(3))
    assert torch.equal(silu[7:].isfinite(), torch.tensor([True, False, False, False]))
    assert silu[8] == float("inf")
    assert silu[9:].isnan().all()


def test_subnormals_of_bf16_are_not_zeros_to_the_functions_with_the_settings_of_eager() -> None:
    """`EAGER_CONFIG` makes Inductor compile with this option of Triton."""
    codes = torch.arange(1, 128, dtype=torch.int16).view(torch.bfloat16).float()
    # 128 threads take a branch together.
    x = torch.cat([codes, codes[:1], -codes, -codes[:1], torch.tensor([-126.5, -130.0]).repeat(64)])
    kept = run(inductor_kernel, x, 5, enable_reflect_ftz=False)
    for got, function in zip(kept, (torch.tanh, torch.rsqrt, torch.ceil, torch.floor, torch.exp2), strict=True):
        expected = function(x.double()).bfloat16()
        same = (got.bfloat16() == expected) | (got.isnan() & expected.isnan())
        assert same.all(), function
    lost = run(inductor_kernel, x, 5)
    pairs = zip(lost.bfloat16(), kept.bfloat16(), strict=True)
    assert [int(((a != b) & ~b.isnan()).sum()) for a, b in pairs] == [256, 128, 128, 128, 128]
