"""Token sums in chunks: where the pass fires, where it refuses, what it writes, memory and numerics."""

from __future__ import annotations

import expecttest
import pytest
import torch
from oracles.allocations import peak_bytes
from torch import Tensor
from torch._inductor import config as inductor_config

import ple_gdn

BUDGET = {"workspace_bytes": 131_072}


def gate(x: Tensor, w: Tensor) -> Tensor:
    """Frozen features behind a per-channel gate: the sigmoid is reused by its own gradient, and stored for it."""
    return torch.sigmoid(x * w).sum()


def affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Two sums over one long chain, one of them a product."""
    h = x * w + b
    return (torch.nn.functional.silu(h) * torch.nn.functional.gelu(h, approximate="tanh")).square().sum()


def parameters(*shape: int, count: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(count)]


def features(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def ours(report: ple_gdn.Report) -> tuple[list[str], list[str]]:
    name = "chunk_token_sums"
    rewrites = [r.detail for r in report.rewrites if r.pass_name == name]
    return rewrites, [r.reason for r in report.refusals if r.pass_name == name]


class Snapshot(expecttest.TestCase):
    def test_the_sum_becomes_a_loop_over_chunks(self):
        torch._dynamo.reset()
        x = features(96, 4)
        torch._dynamo.mark_dynamic(x, 0)
        graphs = ple_gdn.capture_graphs(gate, x, *parameters(4), options={"workspace_bytes": 256})
        self.assertExpectedInline(
            graphs.passes["chunk_token_sums"][0],
            """\
graph main(
    primals_1: Sym(s0),
    primals_2: f32[s0, 4],
    primals_3: f32[4],
    tangents_1: f32[],
):
    mul: f32[s0, 4] = aten.mul.Tensor(primals_2, primals_3)
    sigmoid: f32[s0, 4] = aten.sigmoid.default(mul)
    sum: f32[] = aten.sum.default(sigmoid)
    sym_size: Sym(s0) = aten.sym_size.int(primals_2, 0)
    scalar_tensor: i64[] = aten.scalar_tensor.default(sym_size, dtype=torch.int64, device=device(type='cpu'))
    full: i64[] = aten.full.default([], 0, dtype=torch.int64, device=device(type='cpu'))
    full_1: f32[4] = aten.full.default([4], 0.0, dtype=torch.float32, device=device(type='cpu'))
    while_loop: (i64[], f32[4]) = while_loop(
        token_loop_condition,
        token_loop_body,
        (full, full_1),
        (scalar_tensor, primals_2, primals_3, tangents_1),
    )
    getitem: f32[4] = operator.getitem(while_loop, 1)
    view: f32[1, 4] = aten.view.default(getitem, [1, 4])
    view_1: f32[4] = aten.view.default(view, [4])
    return [sum, None, None, view_1]

graph token_loop_condition(
    arg0_1: i64[],
    arg1_1: f32[4],
    arg2_1: i64[],
    arg3_1: f32[s0, 4],
    arg4_1: f32[4],
    arg5_1: f32[],
):
    lt: b8[] = aten.lt.Tensor(arg0_1, arg2_1)
    return lt

graph token_loop_body(
    arg0_1: i64[],
    arg1_1: f32[4],
    arg2_1: i64[],
    arg3_1: f32[s0, 4],
    arg4_1: f32[4],
    arg5_1: f32[],
):
    iota: i64[4] = prims.iota.default(
        4,
        start=0,
        step=1,
        dtype=torch.int64,
        device=device(type='cpu'),
        requires_grad=False,
    )
    add: i64[4] = aten.add.Tensor(iota, arg0_1)
    lt: b8[4] = aten.lt.Tensor(add, arg2_1)
    sub: i64[] = aten.sub.Tensor(arg2_1, 1)
    minimum: i64[4] = aten.minimum.default(add, sub)
    view: b8[4, 1] = aten.view.default(lt, [4, 1])
    index: f32[4, 4] = aten.index.Tensor(arg3_1, [minimum])
    view_1: f32[4] = aten.view.default(arg4_1, [4])
    view_2: f32[] = aten.view.default(arg5_1, [])
    mul: f32[4, 4] = aten.mul.Tensor(index, view_1)
    sigmoid: f32[4, 4] = aten.sigmoid.default(mul)
    sub_1: f32[4, 4] = aten.sub.Tensor(1, sigmoid)
    mul_1: f32[4, 4] = aten.mul.Tensor(sigmoid, sub_1)
    mul_2: f32[4, 4] = aten.mul.Tensor(view_2, mul_1)
    mul_3: f32[4, 4] = aten.mul.Tensor(mul_2, index)
    scalar_tensor: f32[] = aten.scalar_tensor.default(
        0.0,
        dtype=torch.float32,
        layout=torch.strided,
        device=device(type='cpu'),
    )
    where: f32[4, 4] = aten.where.self(view, mul_3, scalar_tensor)
    sum: f32[4] = aten.sum.dim_IntList(where, [0])
    add_1: i64[] = aten.add.Tensor(arg0_1, 4)
    add_2: f32[4] = aten.add.Tensor(arg1_1, sum)
    return (add_1, add_2)
""",
        )
        assert "while_loop" in graphs.joint[0]
        assert "while_loop" in graphs.backward[0]


def test_one_graph_serves_every_length_and_stays_in_the_budget():
    """A published figure for a [4096, 512] weight reduction under 128 KiB: 90,112 bytes beside inputs and results."""
    torch._dynamo.reset()
    w, b = parameters(512, count=2)
    with inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(affine, backend="ple_gdn", options=BUDGET, fullgraph=True)
        for tokens in (4096, 5001, 70, 19):
            x = features(tokens, 512)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            with torch._dynamo.config.patch(error_on_recompile=tokens < 4096):
                loss = compiled(x, w, b)
            with peak_bytes() as backward:
                got = torch.autograd.grad(loss, (w, b))
            want = torch.autograd.grad(affine(x.double(), w.double(), b.double()), (w, b))
            for a, e in zip(got, want, strict=True):
                assert (a - e).norm() <= 1e-6 * e.norm()
            assert backward.peak <= 90_112, tokens


def test_inductor_alone_stores_what_the_loop_does_not():
    torch._dynamo.reset()
    x, (w, b) = features(2048, 512), parameters(512, count=2)
    loss = torch.compile(affine, backend="inductor")(x, w, b)
    with peak_bytes() as backward:
        torch.autograd.grad(loss, (w, b))
    assert backward.peak >= x.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "leading"),
    [((3, 50, 8), torch.float32, False), ((2, 40, 8), torch.bfloat16, False), ((2, 40, 8), torch.float32, True)],
)
def test_batches_mixed_dtypes_strides_and_broadcast_operands_give_the_same_gradient(shape, dtype, leading):
    torch._dynamo.reset()
    x, (w,) = features(*shape, dtype=dtype), parameters(shape[-1])
    if leading:
        x = x.transpose(0, 1)

    def loss(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return (torch.sigmoid(x.float() * w) * scale).sum()

    scale = features(shape[0], 1, 1) if not leading else features(1, shape[0], 1)
    options = {"workspace_bytes": 1_024}
    with inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(loss, backend="ple_gdn", options=options)
        (got,) = torch.autograd.grad(compiled(x, w, scale), w)
    rewrites, _ = ours(ple_gdn.last_report())
    assert len(rewrites) == 1
    (want,) = torch.autograd.grad(loss(x.double(), w.double(), scale.double()), w)
    assert (got - want).norm() <= 1e-5 * want.norm()


def norm(x: Tensor, w: Tensor) -> Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w)).sin().sum()


def padded(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(torch.nn.functional.pad(x * 2, (0, 0, 3, 0)) * w).sum()


def shared(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x * w).sum()


REFUSED = {
    "computed inside the reduction": (norm, False, "Inductor computes the summed value inside the reduction"),
    "an operand that is not in memory": (padded, False, "may not be in memory and cannot be read in chunks"),
    "stored for the input's gradient too": (shared, True, "or stores it for others as well"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_loop_would_not_help_is_refused_with_the_reason(name):
    torch._dynamo.reset()
    function, needs_input_gradient, reason = REFUSED[name]
    x = features(64, 8).requires_grad_(needs_input_gradient)
    report = ple_gdn.explain(function, x, *parameters(8), options={"workspace_bytes": 1_024})
    rewrites, refusals = ours(report)
    assert rewrites == []
    assert len(refusals) == 1
    assert reason in refusals[0]


def test_the_norm_weight_reduction_of_the_published_shape_needs_no_loop():
    """[4096, 512] under 128 KiB: Inductor keeps one row beside inputs and result (published: 90,112 bytes)."""
    torch._dynamo.reset()
    x, (w,) = features(4096, 512), parameters(512)
    with inductor_config.patch(force_disable_caches=True):
        loss = torch.compile(norm, backend="ple_gdn", options=BUDGET)(x, w)
    with peak_bytes() as backward:
        torch.autograd.grad(loss, w)
    assert backward.peak <= 90_112
    rewrites, refusals = ours(ple_gdn.last_report())
    assert rewrites == []
    assert len(refusals) == 1


def test_rounding_of_16_bit_chains_and_fuse_off_leave_the_sums_alone():
    torch._dynamo.reset()
    x, (w,) = features(256, 8, dtype=torch.bfloat16), parameters(8)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        u = torch.tanh(x)
        return ((u * torch.exp(u)).float() * w).sum()

    options = {"workspace_bytes": 1_024}
    for extra, expected in (({"rounding": "fast"}, 1), ({}, 0), ({"rounding": "fast", "fuse": False}, 0)):
        rewrites, _ = ours(ple_gdn.explain(loss, x, w, options=options | extra))
        assert len(rewrites) == expected, extra


def test_sums_within_the_budget_are_not_looked_at():
    torch._dynamo.reset()
    assert ours(ple_gdn.explain(gate, features(64, 8), *parameters(8))) == ([], [])
