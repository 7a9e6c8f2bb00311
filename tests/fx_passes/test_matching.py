"""What all fusions share: who may use an intermediate, mode changes, writes in between, and how refusals read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles.fusing import Fusing, run_with_grads, traced
from oracles.gated_residual import down, inject, mismatches, mix
from torch.utils.checkpoint import checkpoint

from ple_gdn.fx_passes import fuse_gated_residual
from ple_gdn.fx_passes.graph_text import graph_text
from ple_gdn.fx_passes.matching import where_of
from ple_gdn.options import Options

B, T, N, C = 2, 5, 4, 8
W = N * C


def tensors(*widths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(B, T, width, generator=generator).bfloat16() for width in widths]


def refused(fn, *args) -> list[str]:
    """The reasons of a function that must not be fused, its result being eager's bit by bit."""
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(fn), args)
    assert fusing.ops() == []
    for a, e in zip(actual, run_with_grads(fn, args), strict=True):
        assert mismatches(a, e) == 0
    return fusing.reasons()


def fused(fn, *args) -> Fusing:
    fusing = Fusing()
    actual = run_with_grads(fusing.compile(fn), args)
    assert fusing.reasons() == []
    for a, e in zip(actual, run_with_grads(fn, args), strict=True):
        assert mismatches(a, e) == 0
    return fusing


def gate_without_gradient(up, normed):
    with torch.no_grad():
        gate = torch.sigmoid(up)
    return (gate.unflatten(-1, (N, C)) * normed.unflatten(-1, (N, C))).mean(-2) + up[..., :C]


def view_without_gradient(up, normed):
    with torch.no_grad():
        split = normed.unflatten(-1, (N, C))
    return (torch.sigmoid(up).unflatten(-1, (N, C)) * split).mean(-2) + normed[..., :C]


def gate_under_autocast(up, normed):
    with torch.autocast("cpu", torch.bfloat16):
        gate = torch.sigmoid(up)
    return (gate.unflatten(-1, (N, C)) * normed.unflatten(-1, (N, C))).mean(-2)


@pytest.mark.parametrize("fn", [gate_without_gradient, view_without_gradient, gate_under_autocast])
def test_a_chain_across_a_mode_change_is_refused(fn):
    assert refused(fn, *tensors(W, W)) == ["the chain straddles a change of grad or autocast mode"]


def test_a_chain_wholly_inside_a_mode_is_fused():
    def fn(up, normed):
        with torch.no_grad():
            frozen = mix(up, normed, N)
        with torch.autocast("cpu", enabled=False):
            return mix(up, normed, N) + frozen

    assert fused(fn, *tensors(W, W)).ops() == ["gated_residual_mix"] * 2


def test_a_chain_across_the_edge_of_a_checkpoint_is_left_alone():
    def fn(up, normed):
        gate = checkpoint(torch.sigmoid, up, use_reentrant=False)
        return (gate.unflatten(-1, (N, C)) * normed.unflatten(-1, (N, C))).mean(-2)

    assert refused(fn, *tensors(W, W)) == []


def test_a_length_known_only_at_run_time_is_fused_or_refused_but_never_fails():
    def fn(x, keep):
        rows = x[keep]
        return down(rows, N), mix(rows, rows * 2, N)

    args = (torch.randn(7, W), torch.arange(7) % 2 == 0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fusing = Fusing()
        actual = fusing.compile(fn)(*args)
    assert len(fusing.ops()) + len(fusing.reasons()) == 2
    for a, e in zip(actual, fn(*args), strict=True):
        assert mismatches(a, e) == 0


def write_between(x):
    x = x * 1
    quotient = x / N
    x.mul_(2)
    return F.silu(quotient) + x


def write_in_a_body_between(x):
    quotient = x / N
    buffer = torch.zeros_like(x)
    buffer.add_(x)
    return F.silu(quotient) + buffer


@pytest.mark.parametrize("fn", [write_between, write_in_a_body_between])
def test_a_write_between_the_first_and_the_last_node_is_refused(fn):
    (reason,) = refused(fn, *tensors(W))
    assert reason.endswith("writes in place between the chain's first and last node")


def test_a_write_before_or_after_the_chain_does_no_harm():
    def fn(x):
        x = x * 1
        x.mul_(2)
        y = down(x, N)
        y.add_(1)
        return y

    assert fused(fn, *tensors(W)).ops() == ["gated_residual_down"]


def test_a_torch_func_transform_is_left_alone():
    def fn(x):
        return torch.func.vmap(lambda row: F.silu(row / N))(x)

    fusing = Fusing()
    actual = fusing.compile(fn)(*tensors(W))
    assert fusing.ops() == []
    assert fusing.reasons() == ["the chain is inside a torch.func transform"]
    assert mismatches(actual, fn(*tensors(W))) == 0


def test_sizes_of_an_intermediate_and_views_of_an_input_may_be_used_elsewhere():
    def fn(up, normed):
        split = normed.unflatten(-1, (N, C))
        gate = torch.sigmoid(up)
        return (gate.unflatten(-1, (N, C)) * split).mean(-2) * gate.shape[1], split.sum(-1)

    args = tensors(W, W)
    for arg in args:
        torch._dynamo.mark_dynamic(arg, 1)
    assert fused(fn, *args).ops() == ["gated_residual_mix"]


def test_an_intermediate_that_is_returned_is_refused():
    def fn(hidden, hyper, weights):
        product = hidden.unsqueeze(-2) * weights.unsqueeze(-1)
        return hyper + product.flatten(-2), product

    assert refused(fn, *tensors(C, W, N)) == ["intermediate %product (mul) is used by 2 nodes, not all matched"]


def test_dtypes_the_op_does_not_take_are_refused():
    fusing = Fusing()
    fusing.compile(lambda x: down(x, N))(torch.randn(3, 4, dtype=torch.float64))
    assert fusing.ops() == []
    assert fusing.reasons() == ["%l_x_ is float64; the op takes float32, bfloat16 and float16"]


def test_what_the_op_itself_refuses_is_a_refusal_and_the_graph_stays(monkeypatch):
    before = graph_text(traced(lambda x: F.silu(x / N), *tensors(W)))
    monkeypatch.setattr(fuse_gated_residual, "STREAM_COUNTS", (1, 2, 3, 4, 8))
    fusing = Fusing()
    fusing.compile(lambda x: F.silu(x / 1))(*tensors(W))
    assert fusing.ops() == []
    assert fusing.reasons() == ["the op refuses: streams: expected at least 2 residual streams, got 1"]
    assert graph_text(fusing.graphs[0]) == before.replace("4)", "1)")


def test_without_fusion_nothing_is_touched_nor_refused():
    fn, args = (lambda x: F.silu(x / 4) + F.silu(x / 5)), tensors(W)
    fusing = Fusing(options=Options(fuse=False))
    fusing.compile(fn)(*args)
    assert graph_text(fusing.graphs[0]) == graph_text(traced(fn, *args))
    assert fusing.reasons() == []


def test_matches_that_feed_each_other_are_all_made():
    def fn(hidden, hyper, weights, up):
        for _ in range(3):
            hyper = inject(hidden, hyper, weights)
            hidden = mix(up, hyper, N)
        return down(hidden, N)

    names = ["gated_residual_mix"] * 3 + ["gated_residual_down"] + ["gated_residual_inject"] * 3
    assert fused(fn, *tensors(C, W, N, W)).ops() == names


def test_where_is_the_module_path_else_the_source_line():
    class Block(torch.nn.Module):
        def forward(self, x):
            return down(x, N)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Block(), Block()])
            self.named = torch.nn.ModuleDict({"last": Block()})

        def forward(self, x):
            return self.named["last"](self.layers[1](self.layers[0](x)))

    fusing = Fusing()
    fusing.compile(Model())(*tensors(W))
    assert [rewrite.where for rewrite in fusing.records.rewrites] == ["layers.0", "layers.1", "named.last"]
    fusing = Fusing()
    fusing.compile(lambda x: down(x, N))(*tensors(W))
    (rewrite,) = fusing.records.rewrites
    assert rewrite.where.startswith("gated_residual.py:")
    assert where_of(torch.fx.Graph().placeholder("x")) == "%x"
