"""Fusing the PLE block: each step in its spellings, each step changed, masks, residuals, modes of torch.compile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from oracles.fusing import Fusing, run_with_grads
from oracles.ple import grouped_norm
from torch.utils.checkpoint import checkpoint

from ple_gdn.fx_passes.graph_text import graph_text
from ple_gdn.options import Options

B, T, N, C, K, D, EPS = 2, 12, 4, 8, 4, 3, 1e-6
W, HALO = N * C, (K - 1) * D


def tensors(dtype: torch.dtype = torch.float32, batch: int = B, tokens: int = T) -> list[torch.Tensor]:
    """hidden, key, value, three norm weights, conv weight."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, tokens, W), (batch, tokens, W), (batch, tokens, C), (W,), (W,), (W,), (W, 1, K)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def split(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (N, C))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return grouped_norm(x, weight, C, EPS)


STEPS: dict[str, Callable[..., Any]] = {
    "key_norm": lambda x, w: split(norm(x, w)),
    "query_norm": lambda x, w: split(norm(x, w)),
    "conv_norm": norm,
    "score": lambda k, q: (k * q).sum(dim=-1, keepdim=True) / math.sqrt(C),
    "root": lambda s: s.abs().clamp_min(1e-6).sqrt() * s.sign(),
    "gate": lambda s, v: torch.sigmoid(s) * v.unsqueeze(-2),
    "flatten": lambda g: g.flatten(-2),
    "mask": lambda x, m: (x * m[:, :, None]).to(x.dtype),
    "mask_normed": lambda x, m: (x * m[:, :, None]).to(x.dtype),
    "conv": lambda x, w: F.conv1d(F.pad(x, (HALO, 0))[..., -(HALO + x.shape[-1]) :], w, groups=W, dilation=D),
    "after": lambda c: F.silu(c).transpose(1, 2),
    "sum": lambda g, c: g + c,
    "finish": lambda out, h: out,
}


def block(conv_mask: torch.Tensor | None = None, **changes: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """`Qwen4ExpTextPLELayer` after its projections, with some steps replaced."""
    s = {**STEPS, **changes}

    def ple(hidden, key, value, w_key, w_query, w_conv, conv_weight):
        score = s["score"](s["key_norm"](key, w_key), s["query_norm"](hidden, w_query))
        gated = s["gate"](s["root"](score), value)
        normed = s["conv_norm"](s["flatten"](gated), w_conv)
        gated = s["flatten"](gated)
        if conv_mask is not None:
            gated, normed = s["mask"](gated, conv_mask), s["mask_normed"](normed, conv_mask)
        conv = s["conv"](normed.transpose(1, 2), conv_weight)
        return s["finish"](s["sum"](gated, s["after"](conv)), hidden)

    return ple


def own_padding(x, w):
    return F.conv1d(x, w, None, (1,), (HALO,), (D,), W)[:, :, : x.shape[-1]]


def conv_aten(x, w):
    padded = torch.nn.ConstantPad1d((HALO, 0), 0.0)(x)
    return torch.ops.aten.conv1d.default(padded, w, None, [1], [0], [D], W)


SPELLINGS: dict[str, dict[str, Callable[..., Any]]] = {
    "as published": {},
    "score swapped": {"score": lambda k, q: torch.sum(q * k, -1, keepdim=True).div(math.sqrt(C))},
    "score scaled": {"score": lambda k, q: C**-0.5 * torch.mul(k, q).sum(-1, True)},
    "score without keepdim": {"score": lambda k, q: ((k * q).sum(-1) / math.sqrt(C)).unsqueeze(-1)},
    "root swapped": {"root": lambda s: torch.sign(s) * torch.sqrt(torch.clamp(torch.abs(s), min=1e-6))},
    "gate swapped": {"gate": lambda s, v: v[:, :, None] * s.sigmoid()},
    "gate by view": {"gate": lambda s, v: s.sigmoid() * v.view(B, T, 1, C), "flatten": lambda g: g.reshape(B, T, W)},
    "norms split by view": {
        "key_norm": lambda x, w: norm(x, w).view(B, T, N, C),
        "query_norm": lambda x, w: norm(x, w).reshape(B, T, N, C),
    },
    "conv pads itself": {"conv": own_padding},
    "conv by aten": {"conv": conv_aten},
    "silu module": {"after": lambda c: torch.nn.SiLU()(c).permute(0, 2, 1)},
    "silu after the transpose back": {"after": lambda c: F.silu(c).mT},
    "sum swapped": {"sum": lambda g, c: torch.add(c, g)},
    "residual": {"finish": lambda out, h: h + out},
    "residual swapped": {"finish": lambda out, h: out.add(h)},
}


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Against eager in float32 (its 16-bit gradients are 30-70 % off near gate 0), scaled by the largest element."""
    bound = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[dtype]
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert (a.float() - e.float()).abs().max() <= bound * e.float().abs().max()


def check(fn: Callable[..., Any], args: list[torch.Tensor], **kwargs: Any) -> Fusing:
    """Compiles `fn`, compares outputs and gradients with float32 eager and expects exactly one PLE op."""
    fusing = Fusing(**kwargs)
    actual = run_with_grads(fusing.compile(fn), args)
    assert fusing.ops() == ["ple_gate_conv"]
    assert fusing.reasons() == []
    expected = run_with_grads(fn, [a.detach().float() for a in args])
    assert_close(actual, expected, args[0].dtype)
    return fusing


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_fused_and_agrees_with_eager(name):
    check(block(**SPELLINGS[name]), tensors())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_16_bit_inputs_are_closer_to_float32_than_eager(dtype, batch):
    check(block(finish=lambda out, h: h + out), tensors(dtype, batch))


def test_the_residual_and_the_constants_reach_the_op():
    (node,) = check(block(finish=lambda out, h: h + out), tensors(torch.bfloat16)).nodes("ple_gate_conv")
    assert node.kwargs == {"dilation": D, "eps": EPS, "residual": True}
    (node,) = check(block(), tensors()).nodes("ple_gate_conv")
    assert node.kwargs == {"dilation": D, "eps": EPS, "residual": False}
    names = [arg.name if arg is not None else None for arg in node.args]
    weights = ["l_w_key_", "l_w_query_", "l_w_conv_", "l_conv_weight_"]
    assert names == ["l_hidden_", "l_key_", "l_value_", *weights, None, None]


def test_the_residual_tells_hidden_from_key():
    fn = block(finish=lambda out, h: h + out, score=lambda k, q: STEPS["score"](q, k))
    (node,) = check(fn, tensors()).nodes("ple_gate_conv")
    assert [arg.name for arg in node.args[:2]] == ["l_hidden_", "l_key_"]


def test_a_projection_is_taken_for_the_key():
    def fn(hidden, embedding, value, w_key, w_query, w_conv, conv_weight):
        key = F.linear(embedding, torch.eye(W))
        return block(score=lambda k, q: STEPS["score"](q, k))(hidden, key, value, w_key, w_query, w_conv, conv_weight)

    (node,) = check(fn, tensors()).nodes("ple_gate_conv")
    assert node.args[0].name == "l_hidden_"


MASKS = {
    "bool": lambda: torch.arange(T).expand(B, T) < 9,
    "int64": lambda: (torch.arange(T).expand(B, T) < 9).long(),
    "float32": lambda: (torch.arange(T).expand(B, T) < 9).float(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_the_mask_reaches_the_op(kind, dtype):
    mask = MASKS[kind]()
    (node,) = check(block(mask), tensors(dtype)).nodes("ple_gate_conv")
    assert node.args[8].meta["example_value"].shape == (B, T)


def test_a_mask_with_its_own_trailing_dimension_is_squeezed():
    mask = MASKS["bool"]()[..., None]
    check(block(mask, mask=lambda x, m: x * m, mask_normed=lambda x, m: m * x), tensors())


def biased(x, w):
    return F.conv1d(F.pad(x, (HALO, 0)), w, torch.ones(W, dtype=x.dtype), groups=W, dilation=D)


def strided_twice(x, w):
    return F.conv1d(F.pad(x, (HALO + x.shape[-1] - 1, 0)), w, groups=W, dilation=D, stride=2)


def grouped_by_two(x, w):
    return F.conv1d(F.pad(x, (HALO, 0)), w.repeat(1, 2, 1), groups=W // 2, dilation=D)


def reflected(x, w):
    return F.conv1d(F.pad(x, (HALO, 0), mode="reflect"), w, groups=W, dilation=D)


LOOK_ALIKES: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "floor 1e-5": ({"root": lambda s: s.abs().clamp_min(1e-5).sqrt() * s.sign()}, "floor is 1e-05, expected 1e-06"),
    "no floor": ({"root": lambda s: s.abs().sqrt() * s.sign()}, "floor: expected clamp_min with a number, got abs"),
    "no abs": ({"root": lambda s: s.clamp_min(1e-6).sqrt() * s.sign()}, "inside the root: expected abs"),
    "sign of another score": (
        {"root": lambda s: s.abs().clamp_min(1e-6).sqrt() * (s + 1).sign()},
        "the root and the sign are of different scores",
    ),
    "no scale": ({"score": lambda k, q: (k * q).sum(-1, keepdim=True)}, "score's divisor: expected div"),
    "sqrt(2C)": (
        {"score": lambda k, q: (k * q).sum(-1, keepdim=True) / math.sqrt(2 * C)},
        "score's divisor is 4, expected 2.82843",
    ),
    "divided by C": ({"score": lambda k, q: (k * q).sum(-1, keepdim=True) * (1 / C)}, "score is scaled by 0.125"),
    "sum over streams": (
        {
            "score": lambda k, q: (k * q).sum(2, keepdim=True) / math.sqrt(C),
            "gate": lambda s, v: torch.sigmoid(s) * v.unsqueeze(-2).expand(-1, -1, N, -1),
        },
        "the score does not sum over the last dim",
    ),
    "mean score": ({"score": lambda k, q: (k * q).mean(-1, keepdim=True) / math.sqrt(C)}, "expected sum, got mean"),
    "tanh gate": ({"gate": lambda s, v: torch.tanh(s) * v.unsqueeze(-2)}, "is not sigmoid(...) * value"),
    "eps of one norm": ({"query_norm": lambda x, w: split(grouped_norm(x, w, C, 1e-5))}, "eps differs: 1e-06, 1e-05"),
    "one norm less": ({"key_norm": lambda x, w: split(x)}, "is not the product of a normalised value and 1 + weight"),
    "norm groups of 4": (
        {"conv_norm": lambda x, w: grouped_norm(x, w, 4, EPS)},
        f"the gate scales value [{B}, {T}, 1, {C}] to [{B}, {T}, {N}, {C}], expected [B, T, 8, 4]",
    ),
    "conv bias": ({"conv": biased}, "the convolution has a bias"),
    "conv groups": ({"conv": grouped_by_two}, f"{W // 2} groups for {W} channels, expected depthwise"),
    "conv stride": ({"conv": strided_twice}, "stride is 2, expected 1"),
    "short padding": (
        {"conv": lambda x, w: F.conv1d(F.pad(x, (HALO - 1, 1)), w, groups=W, dilation=D)},
        "pads 8 rows on the left, expected (kernel - 1) * dilation = 9",
    ),
    "padding of another dilation": (
        {"conv": lambda x, w: F.conv1d(F.pad(x, (HALO, 0)), w, groups=W, dilation=2)[..., :T]},
        "pads 9 rows on the left, expected (kernel - 1) * dilation = 6",
    ),
    "last rows kept": (
        {"conv": lambda x, w: F.conv1d(x, w, padding=HALO, groups=W, dilation=D)[..., -T:]},
        "expected its first rows",
    ),
    "reflected padding": ({"conv": reflected}, "pads with mode 'reflect'"),
    "padding with ones": (
        {"conv": lambda x, w: F.conv1d(F.pad(x, (HALO, 0), value=1.0), w, groups=W, dilation=D)},
        "value 1.0, expected zeros",
    ),
    "gelu": ({"after": lambda c: F.gelu(c).transpose(1, 2)}, "no silu(conv1d(...)) of the gated value"),
    "difference": ({"sum": lambda g, c: g - c}, "no silu(conv1d(...)) of the gated value"),
    "alpha": ({"sum": lambda g, c: torch.add(g, c, alpha=2)}, "alpha=2"),
    "score used outside": (
        {"root": lambda s: STEPS["root"](s) + 0 * s.detach(), "finish": lambda out, h: out},
        "expected mul, got add",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_is_refused_with_its_reason(name):
    changes, reason = LOOK_ALIKES[name]
    fn, args = block(**changes), tensors(torch.bfloat16)
    fusing = Fusing()
    actual = fusing.compile(fn)(*args)
    assert "ple_gate_conv" not in fusing.ops()
    assert any(reason in text for text in fusing.reasons()), fusing.reasons()
    torch.testing.assert_close(actual, fn(*args), rtol=1e-2, atol=2e-2)


def test_a_gate_that_is_returned_too_is_refused():
    def fn(*args):
        kept = []
        out = block(root=lambda s: kept.append(s) or STEPS["root"](s))(*args)
        return out, kept[0]

    fusing = Fusing()
    fusing.compile(fn)(*tensors())
    assert "ple_gate_conv" not in fusing.ops()
    assert any("(div) is used by 3 nodes" in reason for reason in fusing.reasons())


@pytest.mark.parametrize("branch", ["mask", "mask_normed"])
def test_a_mask_on_one_branch_is_refused(branch):
    fusing = Fusing()
    fusing.compile(block(MASKS["bool"](), **{branch: lambda x, m: x}))(*tensors())
    assert "ple_gate_conv" not in fusing.ops()
    assert any("conv_mask multiplies only one" in reason for reason in fusing.reasons())


def test_two_different_masks_are_refused():
    fusing = Fusing()
    fusing.compile(block(MASKS["bool"](), mask_normed=lambda x, m: STEPS["mask"](x, ~m)))(*tensors())
    assert "ple_gate_conv" not in fusing.ops()
    assert any("by different masks" in reason for reason in fusing.reasons())


def test_eager_all_leaves_the_block_unfused():
    fusing = Fusing(options=Options(rounding="eager_all"))
    fn, args = block(), tensors(torch.bfloat16)
    actual = fusing.compile(fn)(*args)
    assert "ple_gate_conv" not in fusing.ops()
    assert any('rounding="eager_all"' in reason for reason in fusing.reasons())
    assert torch.equal(actual, fn(*args))


def test_a_dynamic_length_gives_one_graph():
    fusing = Fusing()
    compiled = fusing.compile(block(finish=lambda out, h: h + out))
    for tokens in (5, 12, 70):
        args = tensors(tokens=tokens)
        for arg in args[:3]:
            torch._dynamo.mark_dynamic(arg, 1)
        actual = run_with_grads(compiled, args)
        assert_close(actual, run_with_grads(block(finish=lambda out, h: h + out), args), torch.float32)
    assert len(fusing.graphs) == 1
    assert fusing.ops() == ["ple_gate_conv"]


def test_inside_a_checkpoint_the_body_is_fused():
    check(lambda *args: checkpoint(block(), *args, use_reentrant=False), tensors())


def test_under_autocast_the_op_takes_the_dtypes_that_reach_it():
    def fn(hidden, embedding, value, w_key, w_query, w_conv, conv_weight, key_proj):
        key = F.linear(embedding, key_proj)
        return hidden + block()(hidden, key, value, w_key, w_query, w_conv, conv_weight)

    args = [*tensors(), torch.eye(W)]
    with torch.autocast("cpu", torch.bfloat16):
        fusing = Fusing()
        actual = fusing.compile(fn)(*args)
        (node,) = fusing.nodes("ple_gate_conv")
        assert [a.meta["example_value"].dtype for a in node.args[:2]] == [torch.float32, torch.bfloat16]
        torch.testing.assert_close(actual, fn(*args), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_block_is_fused(mode):
    with mode():
        fusing = Fusing()
        actual = fusing.compile(block())(*tensors())
        assert fusing.ops() == ["ple_gate_conv"]
        torch.testing.assert_close(actual, block()(*tensors()), rtol=1e-5, atol=1e-5)


def test_compiled_by_the_backend_outputs_and_gradients_agree_with_eager():
    fn, args = block(MASKS["bool"](), finish=lambda out, h: h + out), tensors()
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="ple_gdn", fullgraph=True)
    assert_close(run_with_grads(compiled, args), run_with_grads(fn, args), torch.float32)


def wrapped(text: str) -> str:
    """One argument of the op a line."""
    return text.replace("(l_hidden_,", "(\n        l_hidden_,").replace("_, ", "_,\n        ")


def test_snapshot_of_the_rewritten_graph():
    fusing = Fusing()
    fusing.compile(block(MASKS["bool"](), finish=lambda out, h: h + out))(*tensors(torch.bfloat16))
    expecttest.assert_expected_inline(
        wrapped(graph_text(fusing.graphs[0])),
        """\
graph main(
    l_key_: bf16[2, 12, 32],
    l_w_key_: bf16[32],
    l_hidden_: bf16[2, 12, 32],
    l_w_query_: bf16[32],
    l_value_: bf16[2, 12, 8],
    l_w_conv_: bf16[32],
    l_conv_mask_: b8[2, 12],
    l_conv_weight_: bf16[32, 1, 4],
):
    ple_gate_conv: (bf16[2, 12, 32], f32[5, 2, 12, 4]) = ple_gdn.ple_gate_conv.default(
        l_hidden_,
        l_key_,
        l_value_,
        l_w_key_,
        l_w_query_,
        l_w_conv_,
        l_conv_weight_,
        None,
        l_conv_mask_,
        dilation=3,
        eps=1e-06,
        residual=True,
    )
    getitem: bf16[2, 12, 32] = operator.getitem(ple_gate_conv, 0)
    return (getitem,)
""",
    )
