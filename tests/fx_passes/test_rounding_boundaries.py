"""The rounding pass: which nodes round under each option, and the bits that come out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from oracles import gated_residual as oracle
from oracles.gated_residual import all_codes, mismatches
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

import ple_gdn
from ple_gdn.lowerings.by_aten import by_aten

aten = torch.ops.aten

HIDDEN = 64
CONFIG = SimpleNamespace(hc_count=4, hidden_size=HIDDEN, rms_norm_eps=1e-6, hc_lowrank=16)


class Block(nn.Module):
    """One hyper connection around a linear layer: norm, down, mix, injection, and the sums of its gradients."""

    def __init__(self, dtype: torch.dtype, norm: bool) -> None:
        super().__init__()
        self.connection = Qwen4ExpTextGatedResidual(CONFIG)
        if not norm:  # its fp32 mean is a long reduction, whose order is the compiler's: it flips a bit now and then
            self.connection.hc_norm = nn.Identity()
        self.layer = nn.Linear(HIDDEN, HIDDEN, bias=False)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, hyper_input, weights = self.connection(x)
        injection = self.layer(hidden).unsqueeze(-2) * weights.unsqueeze(-1)
        return hidden, hyper_input + injection.flatten(-2)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def run(fn, leaves: list[torch.Tensor], *args) -> list[torch.Tensor]:
    outs = fn(*args)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, upstream)]


def compiled(fn, rounding: str, **options):
    return torch.compile(fn, backend="ple_gdn", fullgraph=True, options={"rounding": rounding, **options})


def fractions(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [mismatches(a, b) / a.numel() for a, b in zip(actual, expected, strict=True)]


def block_and_input(dtype: torch.dtype, norm: bool = True) -> tuple[Block, torch.Tensor]:
    return Block(dtype, norm), torch.randn(2, 65, 4 * HIDDEN).to(dtype).requires_grad_()


def test_a_gated_residual_block_in_bf16_is_eager_up_to_its_long_reductions():
    block, x = block_and_input(torch.bfloat16)
    leaves = [x, *block.parameters()]
    differ = fractions(run(compiled(block, "eager"), leaves, x), run(block, leaves, x))
    assert max(differ) < 2e-3


def test_without_the_norms_reduction_the_bits_are_those_of_eager_in_a_checkpoint_with_dynamic_shapes():
    block, x = block_and_input(torch.bfloat16, norm=False)

    def region(x):
        return checkpoint(block, x, use_reentrant=False)

    fn = torch.compile(region, backend="ple_gdn", fullgraph=True, dynamic=True)
    for rows in (65, 17):
        part = x.detach()[:, :rows].requires_grad_()
        assert fractions(run(fn, [part], part), run(region, [part], part)) == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_code_has_the_bits_of_eager(dtype):
    def fn(x, up, normed, hidden, weights):
        return oracle.down(x, 4), oracle.mix(up, normed, 4), oracle.inject(hidden, normed, weights)

    codes = [oracle.all_codes(dtype).roll(shift).reshape(64, 1024) for shift in (0, 7, 99)]
    leaves = [*codes, *(torch.randn(64, width).to(dtype) for width in (256, 4))]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    *rest, dweights = fractions(run(compiled(fn, "eager"), leaves, *leaves), run(fn, leaves, *leaves))
    assert rest == [0] * 7
    assert dweights < 0.01  # 256 sums over the width


def test_fast_has_the_bits_of_plain_inductor():
    block, x = block_and_input(torch.bfloat16)
    leaves = [x, *block.parameters()]
    plain = run(torch.compile(block, fullgraph=True), leaves, x)
    torch._dynamo.reset()
    assert fractions(run(compiled(block, "fast"), leaves, x), plain) == [0] * len(plain)


@pytest.mark.parametrize("rounding", ["eager", "eager_all"])
def test_fp32_has_no_rounding_and_the_bits_of_plain_inductor(rounding):
    block, x = block_and_input(torch.float32)
    leaves = [x, *block.parameters()]
    plain = run(torch.compile(block, fullgraph=True), leaves, x)
    torch._dynamo.reset()
    ours, code = run_and_get_code(run, compiled(block, rounding), leaves, x)
    assert fractions(ours, plain) == [0] * len(plain)
    assert not any(word in text for text in code for word in ("bfloat16", "half", "float16"))


class Targets:
    """Counts the rounded ops of the graphs that reach code generation."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("ple_gdn_rounded."):
                self.names.append(str(node.target).split(".")[1])


def rounded_names(fn, rounding: str, leaves: list[torch.Tensor], *args) -> list[str]:
    seen = Targets()
    run(compiled(fn, rounding, post_grad_custom_post_pass=seen), leaves, *args)
    return sorted(seen.names)


def swiglu(x, gate, up, down):
    return (F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),)


def test_a_sum_of_two_matrix_products_keeps_its_rounding():
    x, gate, up, down = (torch.randn(*s).bfloat16().requires_grad_() for s in [(33, 64), (96, 64), (96, 64), (64, 96)])
    leaves = [x, gate, up, down]
    eager = run(swiglu, leaves, *leaves)
    assert rounded_names(swiglu, "eager", leaves, *leaves) == ["aten_add_Tensor"]
    torch._dynamo.reset()
    assert fractions(run(compiled(swiglu, "eager_all"), leaves, *leaves), eager) == [0] * len(eager)
    torch._dynamo.reset()
    plain = fractions(run(torch.compile(swiglu), leaves, *leaves), eager)
    assert plain[1] > 0.1  # the gradient of x is the sum


def elementwise(x, y):
    """Chains with reuse, casts (a value read rounded and unrounded), ties and gradient sums."""
    a = torch.tanh(x * 1.7) + y / 3
    b = F.gelu(a) * torch.sigmoid(y) - a
    narrow = (b.float() * 1.37).to(x.dtype)
    scaled = narrow.float() + 1.0
    return b, scaled, a * narrow, torch.exp(a * 0.1) * F.softplus(y)


def test_eager_all_gives_the_bits_of_eager_on_elementwise_code():
    x, y = (torch.randn(64, 128).bfloat16().requires_grad_() for _ in range(2))
    eager = run(elementwise, [x, y], x, y)
    assert fractions(run(compiled(elementwise, "eager_all"), [x, y], x, y), eager) == [0] * len(eager)


def by_other_kernels(x, y):
    """Ops whose eager kernels round inside, take another formula than Inductor's, or round their Python number."""
    return (
        torch.lerp(x, y, 0.3),
        torch.lerp(x, y, y.sigmoid()),
        (x + y) ** 3,
        (x.abs() + 0.1) ** y,
        torch.sub(x, y, alpha=0.3),
        torch.add(x * y, y, alpha=0.3),
        torch.div(x, y, rounding_mode="trunc"),
        x % y,
        torch.fmod(x, y),
        torch.addcmul(x, x, y, value=0.7),
        F.gelu(x * y),
        F.gelu(x * y, approximate="tanh"),
        torch.rsqrt(x.abs() + 0.1) * y,
        0.3 - (y - 0.7) / 0.9 * 1.1,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eager_all_gives_the_bits_of_eager_where_its_kernels_have_their_own_ways(dtype):
    x, y = ((3 * torch.randn(64, 16)).to(dtype).requires_grad_() for _ in range(2))
    eager = run(by_other_kernels, [x, y], x, y)
    assert fractions(run(compiled(by_other_kernels, "eager_all"), [x, y], x, y), eager) == [0] * len(eager)
    assert max(fractions(run(compiled(by_other_kernels, "fast"), [x, y], x, y), eager)) > 0.1
    assert not ple_gdn.last_report().failures


def taken_apart(x, y):
    """Ops that Inductor takes apart into several, each of which would round; ATen's kernels round once."""
    p, q, size = x.sigmoid() * 0.98 + 0.01, y.sigmoid(), y.abs() + 1.1
    losses = (F.mse_loss, F.huber_loss, F.smooth_l1_loss)
    return (
        *[loss(x, y, reduction="none") for loss in losses],
        F.mse_loss(x, y),
        F.binary_cross_entropy(p, q, reduction="none"),
        F.kl_div(p.log(), q, reduction="none"),
        F.soft_margin_loss(x, y.detach().sign(), reduction="none"),
        F.glu(torch.cat([x, y], -1)),
        torch.logit(p),
        torch.logit(p, eps=0.1),
        torch.xlogy(x, size),
        torch.xlogy(0.3, size),
        torch.special.xlog1py(x, size),
        torch.special.entr(p),
        torch.mvlgamma(size, 2),
        torch.addr(x.detach(), y[:, 0].detach(), x[0].detach(), alpha=0.3) * y,
        torch.round(x, decimals=1) * y,
        torch.nextafter(x.detach(), y.detach()) * y,
        F.threshold(x, 0.3, 0.7),
        *[f(x * 0.01) for f in (F.elu, F.selu, F.celu)],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_eager_all_gives_the_bits_of_eager_for_ops_that_are_taken_apart_and_names_them(dtype):
    x, y = ((3 * torch.randn(64, 16)).to(dtype).requires_grad_() for _ in range(2))
    eager = run(taken_apart, [x, y], x, y)
    with inductor_config.patch(fx_graph_cache=False):  # a cached graph's report has no entries
        assert fractions(run(compiled(taken_apart, "eager_all"), [x, y], x, y), eager) == [0] * len(eager)
    report = ple_gdn.last_report()
    assert not report.failures
    assert any(entry.startswith("aten.mse_loss_backward.default in") for entry in report.fallbacks)


def with_scalar_tensors(x, scale):
    pairs = [
        f(*args) for f in (torch.mul, torch.add, torch.sub, torch.div, torch.atan2) for args in ((x, scale), (scale, x))
    ]
    chosen = (torch.maximum(x, scale), torch.where(x > scale, x, scale.to(x.dtype)), torch.clamp(x, min=scale))
    return *pairs, *chosen, torch.addcmul(x, x, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eager_all_takes_0_dim_tensors_of_other_types_as_eager_does(dtype):
    x = all_codes(dtype)
    x = x[x.isfinite() & (x.abs() < 1e4)].requires_grad_()
    for wide in (torch.float32, torch.float64):
        scale = torch.tensor(0.301, dtype=wide)
        eager = run(with_scalar_tensors, [x], x, scale)
        with inductor_config.patch(fx_graph_cache=False):  # a cached graph's report has no entries
            actual = run(compiled(with_scalar_tensors, "eager_all"), [x], x, scale)
        assert fractions(actual, eager) == [0] * len(eager)
        fallbacks = ple_gdn.last_report().fallbacks
        assert any("aten.add.Tensor" in entry for entry in fallbacks), fallbacks


def test_a_scalar_tensor_of_the_same_type_or_a_vector_is_fused():
    x, same, vector = torch.randn(8, 4).bfloat16(), torch.tensor(0.3).bfloat16(), torch.randn(1)
    assert not by_aten(aten.mul.Tensor, (x, same))
    assert not by_aten(aten.mul.Tensor, (x, vector))
    assert not by_aten(aten.mul.Tensor, (x, torch.tensor(True)))
    assert by_aten(aten.mul.Tensor, (x, torch.tensor(3)))
    assert not by_aten(aten.mul.Tensor, (x.float(), same))
    assert by_aten(aten.mul.Tensor, (x, same.float()))


INTEGERS = (0, 3, -257, 70000, 2**40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eager_all_rounds_integers_as_eager_does(dtype):
    def fn(x, k):
        numbers = [f(x) for n in INTEGERS for f in (lambda x: x * n, lambda x: x + n, lambda x: n - x, lambda x: x / n)]  # noqa: B023
        tensors = (x * k, x + k, k - x, x / k, k / x, torch.where(x > k, x, k), torch.maximum(x, k), torch.atan2(k, x))
        return (
            *numbers,
            *tensors,
            *[t.long() * x for t in (x, k)],
            x * torch.arange(x.numel()),
            x * (k > 3),
            x * k * 1.1,
        )

    x = all_codes(dtype)
    x = torch.where(x.isfinite(), x, x.new_zeros(()))
    generator = torch.Generator().manual_seed(0)
    for integer in (torch.int64, torch.int32, torch.int16):
        k = torch.randint(-30000, 30000, x.shape, generator=generator).to(integer)
        actual, eager = compiled(fn, "eager_all")(x, k), fn(x, k)
        assert [a.dtype for a in actual] == [b.dtype for b in eager]
        assert [
            int((a != b).logical_and(~(a.isnan() & b.isnan())).sum()) for a, b in zip(actual, eager, strict=True)
        ] == [0] * len(eager)


def test_eager_all_rounds_sizes_of_dynamic_shapes_as_eager_does():
    def fn(x):
        return x + (x.shape[0] + 220), x * x.shape[0], x / (x.shape[0] + 3), x.shape[0] - x

    dynamic = torch.compile(fn, backend="ple_gdn", fullgraph=True, dynamic=True, options={"rounding": "eager_all"})
    for length in (37, 51, 300, 303):
        x = torch.linspace(-300, 300, length).bfloat16()
        assert fractions(dynamic(x), fn(x)) == [0] * 4
    assert not ple_gdn.last_report().failures


def test_eager_all_keeps_nan_and_signs_of_a_product_with_zero():
    x = torch.tensor([float("nan"), float("inf"), -1.0, -0.0, 2.0]).bfloat16()
    for zero in (0, 0.0, False):
        actual, eager = compiled(lambda x, zero=zero: (x * zero, zero / x), "eager_all")(x), (x * zero, zero / x)
        assert fractions(actual, eager) == [0, 0]


def at_every_code(x, y):
    """Ops that Inductor fuses taken apart (`TAKEN_APART_EXACTLY`, some untagged), and some that differ at few codes."""
    unary = (F.hardshrink, F.hardsigmoid, F.hardswish, F.hardtanh, F.logsigmoid, F.mish, F.relu, F.softplus)
    unary += (torch.deg2rad, torch.rad2deg, torch.frac, torch.sgn, torch.nan_to_num, torch.tanh)
    unary += (torch.asinh, torch.expm1, torch.i0, torch.sinc)
    return (
        *[f(x) for f in unary],
        F.leaky_relu(x, 0.13),
        F.softplus(x, 1.3, 2.0),
        F.threshold(x, 0.3, 0.7),
        torch.clamp(x, -0.7, 0.9),
        torch.clamp(x, y, y + 1),
        torch.fmax(x, y),
        torch.fmin(x, y),
        torch.logaddexp(x, y),
        torch.rsub(x, 0.3, alpha=0.7),
        torch.heaviside(x.detach(), y.detach()) * y,
        x.masked_fill(y > 0, 0.3),
        F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="none"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eager_all_gives_the_bits_of_eager_for_every_finite_code(dtype):
    codes = oracle.all_codes(dtype)
    x = torch.where(codes.isfinite(), codes, 0).reshape(256, 256).requires_grad_()
    y = torch.randn(256, 256).to(dtype).requires_grad_()
    eager = run(at_every_code, [x, y], x, y)
    assert fractions(run(compiled(at_every_code, "eager_all"), [x, y], x, y), eager) == [0] * len(eager)


def test_a_comparison_under_eager_all_reads_the_rounded_value():
    x = torch.randn(64, 128).bfloat16()

    def ties(x):
        scaled = x / 3
        return (scaled == scaled.amax(-1, keepdim=True)).sum(-1)

    counts = torch.compile(ties, backend="ple_gdn", options={"rounding": "eager_all"})(x)
    assert int(counts.min()) >= 1
    assert torch.equal(counts, ties(x))


@pytest.mark.parametrize("rounding", ["eager", "eager_all"])
def test_a_cast_down_and_up_keeps_its_rounding(rounding):
    residual, gate, y = (torch.randn(64, 64) for _ in range(3))

    def fn(residual, gate, y):
        return residual + (gate * y).to(torch.bfloat16).float()

    assert mismatches(compiled(fn, rounding)(residual, gate, y), fn(residual, gate, y)) == 0


def test_eager_rounds_only_what_is_connected_to_a_gated_residual():
    def fn(x, up):
        unrelated = torch.tanh(x[0].clone() * 3) * 2
        return ple_gdn.gated_residual_mix(up, x + 1, 4), unrelated.float()

    x, up = (torch.randn(17, 256).bfloat16().requires_grad_() for _ in range(2))
    names = rounded_names(fn, "eager", [x, up], x, up)
    assert "aten_sigmoid_default" in names or "aten_sigmoid" in names
    assert not any("tanh" in name for name in names)
    torch._dynamo.reset()
    assert rounded_names(fn, "fast", [x, up], x, up) == []
