"""Fusing mix, down and inject: every spelling keeps eager's bits, every look-alike is refused with its reason."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from oracles.fusing import Fusing, run_with_grads
from oracles.gated_residual import mismatches
from torch.utils.checkpoint import checkpoint

from ple_gdn.fx_passes.graph_text import graph_text

B, T, N, C = 2, 5, 4, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def split(x: torch.Tensor, streams: int = N) -> torch.Tensor:
    return x.unflatten(-1, (streams, -1))


MIXES = {
    "as published": lambda u, x: (torch.sigmoid(u).unflatten(-1, (N, C)) * x.unflatten(-1, (N, C))).mean(dim=-2),
    "normed first": lambda u, x: (x.unflatten(-1, (N, C)) * torch.sigmoid(u).unflatten(-1, (N, C))).mean(dim=-2),
    "split, then sigmoid": lambda u, x: (split(u).sigmoid() * split(x)).mean(-2),
    "product, then split": lambda u, x: split(u.sigmoid() * x).mean(-2),
    "positive dim": lambda u, x: torch.mul(F.sigmoid(split(u)), split(x)).mean(dim=2),
    "list of dims": lambda u, x: torch.mean(torch.multiply(split(u.sigmoid()), split(x)), [-2]),
    "view and reshape": lambda u, x: (u.view(B, T, N, C).sigmoid() * x.reshape(B, T, N, C)).mean(2),
    "module": lambda u, x: (split(torch.nn.Sigmoid()(u)) * split(x)).mean(-2),
    "one shared split": lambda u, x: (split(u.sigmoid()) * (s := split(x))).mean(-2) + s.select(-2, 0),
    "rows merged": lambda u, x: (u.view(-1, N, C).sigmoid() * x.view(-1, N, C)).mean(1),
}
DOWNS = {
    "as published": lambda x: F.silu(x / N),
    "method": lambda x: F.silu(x.div(float(N))),
    "function": lambda x: torch.nn.functional.silu(torch.true_divide(x, N)),
    "module": lambda x: torch.nn.SiLU()(torch.div(x, N)),
    "aten": lambda x: torch.ops.aten.silu.default(torch.ops.aten.div.Tensor(x, N)),
}
INJECTS = {
    "as published": lambda h, x, w: x + (h.unsqueeze(-2) * w.unsqueeze(-1)).flatten(-2),
    "sum swapped": lambda h, x, w: (h.unsqueeze(-2) * w.unsqueeze(-1)).flatten(-2) + x,
    "product swapped": lambda h, x, w: torch.add(x, (w.unsqueeze(-1) * h.unsqueeze(-2)).flatten(-2)),
    "indexing": lambda h, x, w: x.add((h[..., None, :] * w[..., None]).reshape(B, T, N * C)),
    "sum, then flatten": lambda h, x, w: (split(x) + h[:, :, None] * w[..., None]).flatten(-2),
    "view": lambda h, x, w: x + (h.view(B, T, 1, C) * w.view(B, T, N, 1)).view(B, T, N * C),
    "module": lambda h, x, w: x + torch.nn.Flatten(-2)(h.unsqueeze(2) * w.unsqueeze(3)),
}
SHAPES = {"mix": [(B, T, N * C)] * 2, "down": [(B, T, 6)], "inject": [(B, T, C), (B, T, N * C), (B, T, N)]}
TABLES = {"mix": MIXES, "down": DOWNS, "inject": INJECTS}
SPELLINGS = [(kind, name, fn) for kind, table in TABLES.items() for name, fn in table.items()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "name", "fn"), SPELLINGS, ids=[f"{kind}: {name}" for kind, name, _ in SPELLINGS])
def test_every_spelling_is_fused_and_keeps_the_bits_of_eager(kind, name, fn, dtype):
    args = tensors(*SHAPES[kind], dtype=dtype)
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(fn), args)
    assert fusing.ops() == [f"gated_residual_{kind}"]
    assert fusing.reasons() == []
    for a, e in zip(actual, run_with_grads(fn, args), strict=True):
        assert mismatches(a, e) == 0


@pytest.mark.parametrize("streams", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [(), (7,), (1, 3), (2, 3, 2)], ids=str)
def test_stream_counts_and_ranks(streams, rows):
    def block(h, x, w, up):
        mixed = (split(up, streams).sigmoid() * split(x, streams)).mean(-2)
        return F.silu(mixed / streams), x + (h.unsqueeze(-2) * w.unsqueeze(-1)).flatten(-2)

    args = tensors((*rows, C), (*rows, streams * C), (*rows, streams), (*rows, streams * C), dtype=torch.bfloat16)
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(block), args)
    assert sorted(fusing.ops()) == ["gated_residual_down", "gated_residual_inject", "gated_residual_mix"]
    for a, e in zip(actual, run_with_grads(block, args), strict=True):
        assert mismatches(a, e) == 0


def down_in_context(divisor):
    def fn(x, weight, normed):
        return (split(F.linear(F.silu(x / divisor), weight)).sigmoid() * split(normed)).mean(-2)

    return fn


def used_sigmoid(up, normed):
    gate = torch.sigmoid(up)
    return (split(gate) * split(normed)).mean(-2), gate


def used_quotient(x):
    quotient = x / N
    return F.silu(quotient) + quotient


def used_outer(h, x, w):
    product = h.unsqueeze(-2) * w.unsqueeze(-1)
    return x + product.flatten(-2), product


def added_in_place(h, x, w):
    x = x * 1.0
    x += (h.unsqueeze(-2) * w.unsqueeze(-1)).flatten(-2)
    return x


W = N * C


def product(up, normed, streams=N):
    return split(up.sigmoid(), streams) * split(normed, streams)


def outer(hidden, weights):
    return (hidden.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)


MIX_LOOK_ALIKES = {
    "mean over channels": (lambda u, x: product(u, x).mean(-1), "mean over dim -1, expected the stream dim -2"),
    "mean over two dims": (lambda u, x: product(u, x).mean((-1, -2)), "mean over dim -1, -2"),
    "mean over all": (lambda u, x: product(u, x).mean(), "mean over all dims"),
    "keepdim": (lambda u, x: product(u, x).mean(-2, keepdim=True), "keepdim=True"),
    "mean in float32": (lambda u, x: product(u, x).mean(-2, dtype=torch.float32), "mean is taken in float32"),
    "16 streams": (lambda u, x: product(u, x, 16).mean(-2), "16 streams: supported are 2, 3, 4, 8"),
    "broadcast gate": (lambda u, x: (split(u)[..., :1].sigmoid() * split(x)).mean(-2), "is broadcast to"),
    "used sigmoid": (used_sigmoid, "intermediate %gate (sigmoid) is used by 2 nodes"),
}
DOWN_LOOK_ALIKES = {
    "five streams": (lambda x: F.silu(x / 5), "divides by 5; supported stream counts"),
    "not a count": (lambda x: F.silu(x / 4.5), "divides by 4.5"),
    "floor division": (lambda x: F.silu(torch.div(x, N, rounding_mode="floor")), "rounding_mode='floor'"),
    "used quotient": (used_quotient, "intermediate %quotient (div) is used by 2 nodes"),
}
INJECT_LOOK_ALIKES = {
    "alpha": (lambda h, x, w: torch.add(x, outer(h, w), alpha=2), "alpha=2"),
    "used outer product": (used_outer, "(mul) is used by 2 nodes"),
    "stream of every channel": (
        lambda h, x, w: x.repeat(1, 1, 3) + outer(w, h.repeat(1, 1, 3)),
        "24 streams: supported",
    ),
    "one weight row": (lambda h, x, w: x + outer(h, w[:, :1]), "weights [2, 1, 4, 1] is broadcast"),
    "one stream row": (lambda h, x, w: x[:, :1] + outer(h, w), "broadcasts"),
}
LOOK_ALIKE_TABLES = {"mix": MIX_LOOK_ALIKES, "down": DOWN_LOOK_ALIKES, "inject": INJECT_LOOK_ALIKES}
LOOK_ALIKES = [(kind, name, *case) for kind, table in LOOK_ALIKE_TABLES.items() for name, case in table.items()]


@pytest.mark.parametrize(("kind", "name", "fn", "reason"), LOOK_ALIKES, ids=[f"{k}: {n}" for k, n, *_ in LOOK_ALIKES])
def test_a_look_alike_is_refused_with_its_reason(kind, name, fn, reason):
    args = tensors(*SHAPES[kind], dtype=torch.bfloat16)
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(fn), args)
    assert fusing.ops() == []
    assert len(fusing.reasons()) == 1
    assert reason in fusing.reasons()[0]
    for a, e in zip(actual, run_with_grads(fn, args), strict=True):
        assert mismatches(a, e) == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.silu(x * 0.25),
        lambda x: F.silu(x / x.sum()),
        lambda x: (x / N) * torch.sigmoid(x / N),  # rounds twice where silu rounds once
        lambda x: F.silu(x / N, inplace=True),
        lambda x: torch.sigmoid(x / N),
    ],
    ids=["product", "tensor divisor", "x * sigmoid(x)", "in place", "sigmoid"],
)
def test_other_functions_are_no_candidates(fn):
    fusing = Fusing()
    fusing.compile(fn)(*tensors((B, T, 6)))
    assert fusing.ops() == []
    assert fusing.reasons() == []


def test_an_in_place_injection_is_left_alone():
    args = tensors(*SHAPES["inject"], dtype=torch.bfloat16)
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(added_in_place), args)
    assert fusing.ops() == []
    for a, e in zip(actual, run_with_grads(added_in_place, args), strict=True):
        assert mismatches(a, e) == 0


def test_the_division_is_held_against_the_streams_of_its_mix():
    args = tensors((B, T, 6), (W, 6), (B, T, W))
    fusing = Fusing()
    fusing.compile(down_in_context(3))(*args)
    assert fusing.ops() == ["gated_residual_mix"]
    assert fusing.reasons() == ["divides by 3, streams are 4"]
    fusing = Fusing()
    fusing.compile(down_in_context(4))(*args)
    assert fusing.ops() == ["gated_residual_mix", "gated_residual_down"]


def block(h, x, w, up):
    mixed = (split(torch.sigmoid(up)) * split(x)).mean(dim=-2)
    return F.silu(mixed / N), x + (h.unsqueeze(-2) * w.unsqueeze(-1)).flatten(-2)


BLOCK_SHAPES = [(B, T, C), (B, T, W), (B, T, N), (B, T, W)]
BLOCK_OPS = ["gated_residual_mix", "gated_residual_down", "gated_residual_inject"]


def test_a_dynamic_length_gives_one_graph():
    fusing = Fusing()
    compiled = fusing.compile(block)
    for length in (5, 9, 70):
        args = tensors((B, length, C), (B, length, W), (B, length, N), (B, length, W), dtype=torch.bfloat16)
        for arg in args:
            torch._dynamo.mark_dynamic(arg, 1)
        for a, e in zip(run_with_grads(compiled, args), run_with_grads(block, args), strict=True):
            assert mismatches(a, e) == 0
    assert len(fusing.graphs) == 1
    assert fusing.ops() == BLOCK_OPS


def test_every_size_dynamic_fuses_what_keeps_a_constant_stream_count():
    fusing = Fusing()
    compiled = fusing.compile(block, dynamic=True)
    for length, channels in ((5, C), (9, 6)):
        args = tensors((B, length, channels), (B, length, N * channels), (B, length, N), (B, length, N * channels))
        for a, e in zip(run_with_grads(compiled, args), run_with_grads(block, args), strict=True):
            assert mismatches(a, e) == 0
    assert len(fusing.graphs) == 1
    assert fusing.ops() == BLOCK_OPS[:2]
    assert "is not a constant" in fusing.reasons()[0]


def test_inside_a_checkpoint_the_body_is_fused():
    def fn(*args):
        return checkpoint(block, *args, use_reentrant=False)

    args = tensors(*BLOCK_SHAPES, dtype=torch.bfloat16)
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(fn), args)
    assert fusing.ops() == BLOCK_OPS
    for a, e in zip(actual, run_with_grads(fn, args), strict=True):
        assert mismatches(a, e) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_grad_mode_is_fused(mode):
    args = tensors(*BLOCK_SHAPES, dtype=torch.bfloat16)
    with mode():
        fusing = Fusing()
        actual = fusing.compile(block)(*args)
        assert fusing.ops() == BLOCK_OPS
        for a, e in zip(actual, block(*args), strict=True):
            assert mismatches(a, e) == 0


def test_under_autocast_the_ops_take_the_dtypes_that_reach_them():
    def fn(x, down, up, inject):
        low = F.silu(F.linear(x, down) / N)
        mixed = (split(torch.sigmoid(F.linear(low, up))) * split(x)).mean(-2)
        weights = 2 * torch.sigmoid(F.linear(x, inject) / N)
        return x + (mixed.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)

    args = tensors((B, T, W), (6, W), (W, 6), (N, W))
    with torch.autocast("cpu", torch.bfloat16):
        fusing = Fusing()
        actual = run_with_grads(fusing.compile(fn), args)
        assert fusing.ops() == BLOCK_OPS
        (mix,) = fusing.nodes("gated_residual_mix")
        assert [node.meta["example_value"].dtype for node in mix.args[:2]] == [torch.bfloat16, torch.float32]
        for a, e in zip(actual, run_with_grads(fn, args), strict=True):
            assert mismatches(a, e) == 0


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_mixed_dtypes_keep_the_bits_of_eager(dtypes):
    low, high = dtypes
    h, x, w, up = tensors(*BLOCK_SHAPES)
    args = [h.to(low), x.to(high), w.to(low), up.to(low)]
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(block), args)
    assert fusing.ops() == BLOCK_OPS
    for a, e in zip(actual, run_with_grads(block, args), strict=True):
        assert mismatches(a, e) == 0


def test_compiled_by_the_backend_the_bits_are_those_of_eager():
    args = tensors(*BLOCK_SHAPES, dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="ple_gdn", fullgraph=True)
    for a, e in zip(run_with_grads(compiled, args), run_with_grads(block, args), strict=True):
        assert mismatches(a, e) == 0


def test_snapshot_of_the_rewritten_graph():
    fusing = Fusing()
    fusing.compile(block)(*tensors(*BLOCK_SHAPES, dtype=torch.bfloat16))
    expecttest.assert_expected_inline(
        graph_text(fusing.graphs[0]),
        """\
graph main(
    l_up_: bf16[2, 5, 32],
    l_x_: bf16[2, 5, 32],
    l_h_: bf16[2, 5, 8],
    l_w_: bf16[2, 5, 4],
):
    gated_residual_mix: bf16[2, 5, 8] = ple_gdn.gated_residual_mix.default(l_up_, l_x_, 4)
    gated_residual_down: bf16[2, 5, 8] = ple_gdn.gated_residual_down.default(gated_residual_mix, 4)
    gated_residual_inject: bf16[2, 5, 32] = ple_gdn.gated_residual_inject.default(l_h_, l_x_, l_w_)
    return (gated_residual_down, gated_residual_inject)
""",
    )
