"""Fusing the grouped zero-centred RMSNorm: spellings, look-alikes, and what is no candidate."""

from __future__ import annotations

import expecttest
import pytest
import torch
from oracles.fusing import Fusing, run_with_grads
from oracles.gated_residual import grouped_rms_norm, mismatches

from ple_gdn.fx_passes.graph_text import graph_text

B, T, N, C, EPS = 2, 5, 4, 8, 1e-6
W = N * C


def tensors(dtype: torch.dtype, weight_dtype: torch.dtype | None = None, rows=(B, T)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(*rows, W, generator=generator)
    return [x.to(dtype), torch.randn(W, generator=generator).to(weight_dtype or dtype)]


def groups(x: torch.Tensor) -> torch.Tensor:
    return x.float().unflatten(-1, (N, C))


def finish(normed: torch.Tensor, weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (normed.flatten(-2) * (1.0 + weight.float())).type_as(like)


def mean_square(g: torch.Tensor) -> torch.Tensor:
    return g.pow(2).mean(-1, keepdim=True)


def module_spelling(x, weight):
    g = torch.nn.Unflatten(-1, (N, C))(x.to(torch.float32))
    normed = torch.rsqrt(EPS + torch.square(g).mean(dim=(-1,), keepdim=True)) * g
    return ((weight.to(torch.float32) + 1) * torch.nn.Flatten(-2)(normed)).to(x.dtype)


def grouped_weight(x, weight):
    g = groups(x)
    return (g * torch.rsqrt(mean_square(g) + EPS) * (1 + weight.float().view(N, C))).flatten(-2).type_as(x)


def split_before_cast(x, weight):
    g = x.view(B, T, N, C).float()
    return finish(g * ((g * g).mean(-1, True) + EPS).rsqrt(), weight, x)


def divided_by_root(x, weight):
    g = groups(x)
    return finish(g / torch.sqrt(mean_square(g) + EPS), weight, x)


def one_over_root(x, weight):
    g = groups(x)
    return finish(g * (1 / (mean_square(g) + EPS).sqrt()), weight, x)


def reciprocal_root(x, weight):
    g = groups(x)
    return finish(g * torch.reciprocal((g**2).mean(-1, keepdim=True).add(EPS).sqrt()), weight, x)


def power(x, weight):
    g = groups(x)
    return finish(g * (mean_square(g) + EPS).pow(-0.5), weight, x)


def cast_twice(x, weight):
    return finish(groups(x) * torch.rsqrt(mean_square(groups(x)) + EPS), weight, x)


def without_keepdim(x, weight):
    g = groups(x)
    return finish(g * torch.rsqrt(g.pow(2).mean(-1) + EPS)[..., None], weight, x)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """In 16 bits, eager rounds the gradients of two casts of one tensor before it adds them: two roundings apart."""
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


SPELLINGS = {
    "as published": lambda x, weight: grouped_rms_norm(x, weight, C, EPS),
    "modules": module_spelling,
    "grouped weight": grouped_weight,
    "split before cast": split_before_cast,
    "divided by root": divided_by_root,
    "one over root": one_over_root,
    "reciprocal": reciprocal_root,
    "power": power,
    "cast twice": cast_twice,
    "without keepdim": without_keepdim,
}


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_fused_and_agrees_with_eager(name, dtypes):
    fn, args = SPELLINGS[name], tensors(*dtypes)
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(fn), args)
    assert fusing.ops() == ["grouped_rms_norm"]
    assert fusing.reasons() == []
    (node,) = fusing.nodes("grouped_rms_norm")
    assert node.kwargs == {"group_size": C, "eps": EPS}
    assert node.args[0].meta["example_value"].dtype == dtypes[0]
    for a, e in zip(actual, run_with_grads(fn, args), strict=True):
        assert_close(a, e)


def test_as_published_the_op_keeps_the_bits_of_eager():
    args = tensors(torch.bfloat16)
    fn = SPELLINGS["as published"]
    for a, e in zip(run_with_grads(Fusing().compile(fn), args), run_with_grads(fn, args), strict=True):
        assert mismatches(a, e) == 0


def scaled(normed: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (normed.flatten(-2) * scale).type_as(x)


def normalised(x: torch.Tensor, dim: int = -1, eps: float = EPS) -> torch.Tensor:
    g = groups(x)
    return g * torch.rsqrt(g.pow(2).mean(dim, keepdim=True) + eps)


def in_low_precision(x, weight):
    g = x.unflatten(-1, (N, C))
    return finish((g * torch.rsqrt(mean_square(g) + EPS)).float(), weight, x)


def other_value(x, weight):
    return finish(groups(x).abs() * torch.rsqrt(mean_square(groups(x)) + EPS), weight, x)


def used_root(x, weight):
    g = groups(x)
    root = torch.rsqrt(mean_square(g) + EPS)
    return finish(g * root, weight, x), root


LOOK_ALIKES = {
    "weight not centred": (lambda x, w: scaled(normalised(x), w.float(), x), "scale is not 1 + weight"),
    "two plus weight": (lambda x, w: scaled(normalised(x), 2.0 + w.float(), x), "scale is not 1 + weight"),
    "16-bit scale": (lambda x, w: scaled(normalised(x), 1.0 + w, x), "scale is not 1 + weight in float32"),
    "rounded before the scale": (
        lambda x, w: scaled(normalised(x).type_as(x), 1.0 + w.float(), x),
        "rounded to bfloat16 before it is scaled",
    ),
    "mean over streams": (lambda x, w: finish(normalised(x, -2), w, x), "mean of squares over dims (2,)"),
    "result stays float32": (lambda x, w: normalised(x).flatten(-2) * (1.0 + w.float()), "result stays float32"),
    "16-bit norm": (in_low_precision, "rounded to"),
    "another value": (other_value, "root of another value's mean square"),
    "used root": (used_root, "intermediate %root (rsqrt) is used by 2 nodes"),
    "negative eps": (lambda x, w: finish(normalised(x, eps=-1e-6), w, x), "eps is -1e-06"),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_is_refused_with_its_reason(name):
    fn, reason = LOOK_ALIKES[name]
    args = tensors(torch.bfloat16)
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(fn), args)
    assert fusing.ops() == []
    assert len(fusing.reasons()) == 1
    assert reason in fusing.reasons()[0]
    for a, e in zip(actual, run_with_grads(fn, args), strict=True):
        assert mismatches(a, e) == 0


def plain_norm(x, weight):
    x32 = x.float()
    return (x32 * torch.rsqrt(mean_square(x32) + EPS) * (1.0 + weight.float())).type_as(x)


def head_norm(x, weight):
    g = groups(x)
    return (g * torch.rsqrt(mean_square(g) + EPS) * (1.0 + weight[:C].float())).type_as(x)


@pytest.mark.parametrize("fn", [plain_norm, head_norm])
def test_a_norm_without_groups_is_no_candidate(fn):
    fusing = Fusing()
    fusing.compile(fn)(*tensors(torch.bfloat16))
    assert fusing.ops() == []
    assert fusing.reasons() == []


def test_a_shared_cast_of_the_input_stays():
    def fn(x, weight):
        x32 = x.float()
        g = x32.reshape(B, T, N, C)
        return finish(g * torch.rsqrt(mean_square(g) + EPS), weight, x), x32.sin()

    args = tensors(torch.bfloat16)
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(fn), args)
    assert fusing.ops() == ["grouped_rms_norm"]
    for a, e in zip(actual, run_with_grads(fn, args), strict=True):
        assert_close(a, e)


def test_a_dynamic_length_gives_one_graph():
    fusing = Fusing()
    compiled = fusing.compile(lambda x, weight: grouped_rms_norm(x, weight, C, EPS))
    for length in (5, 9, 70):
        args = tensors(torch.float32, rows=(B, length))
        torch._dynamo.mark_dynamic(args[0], 1)
        compiled(*args)
    assert len(fusing.graphs) == 1
    assert fusing.ops() == ["grouped_rms_norm"]


class ScaledNorm(torch.nn.Module):
    def __init__(self, eps: float, scale: float) -> None:
        super().__init__()
        self.eps, self.scale = eps, scale

    def forward(self, x, weight):
        g = groups(x)
        return finish(g * torch.rsqrt(mean_square(g) + self.eps), weight, x) * self.scale


def test_models_of_one_class_with_other_constants_are_each_fused_with_their_own():
    torch._dynamo.reset()
    x, weight = tensors(torch.bfloat16)
    backend = Fusing()
    for eps in (1e-6, 0.5, 2.0, 0.5):
        model = ScaledNorm(eps, 2.0)
        assert torch.equal(torch.compile(model, backend=backend)(x, weight), model(x, weight))
    assert len(backend.graphs) == 3
    assert len(backend.records.rewrites) == 3
    assert [node.kwargs["eps"] for node in backend.nodes("grouped_rms_norm")] == [1e-6, 0.5, 2.0]


def test_a_number_that_is_no_part_of_a_chain_is_not_guarded_on():
    torch._dynamo.reset()
    x, weight = tensors(torch.float32)
    backend = Fusing()
    for scale in (2.0, 3.0, 4.0, 5.0):
        model = ScaledNorm(EPS, scale)
        torch.testing.assert_close(torch.compile(model, backend=backend)(x, weight), model(x, weight))
    assert len(backend.graphs) == 2


def test_snapshot_of_the_rewritten_graph():
    fusing = Fusing()
    fusing.compile(lambda x, weight: grouped_rms_norm(x, weight, C, EPS))(*tensors(torch.bfloat16))
    expecttest.assert_expected_inline(
        graph_text(fusing.graphs[0]),
        """\
graph main(
    l_x_: bf16[2, 5, 32],
    l_weight_: bf16[32],
):
    grouped_rms_norm: bf16[2, 5, 32] = ple_gdn.grouped_rms_norm.default(
        l_x_,
        l_weight_,
        group_size=8,
        eps=1e-06,
    )
    return (grouped_rms_norm,)
""",
    )
