"""Ops that stand for a function of transformers are counted as rewrites; ops that the user calls are not."""

from __future__ import annotations

import torch

import ple_gdn
from ple_gdn.fx_passes.records import Rewrite


def inputs():
    q, k = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16)
    v, g, beta = torch.randn(1, 8, 2, 16), -torch.rand(1, 8, 2), torch.rand(1, 8, 2)
    return q, k, v, g, beta


def test_a_substituted_chunk_rule_is_recorded_with_the_function_it_stands_for():
    from transformers.models.qwen3_next import modeling_qwen3_next

    class Layer(torch.nn.Module):
        def forward(self, *tensors):
            return modeling_qwen3_next.torch_chunk_gated_delta_rule(*tensors)[0]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, *tensors):
            return self.layer(*tensors)

    report = ple_gdn.explain(Model(), *inputs())
    expected = Rewrite("substitute", "gated_delta_rule", "layer", "torch_chunk_gated_delta_rule")
    assert report.rewrites == (expected,)


def test_an_op_that_the_user_calls_is_not():
    report = ple_gdn.explain(lambda *tensors: ple_gdn.gated_delta_rule(*tensors)[0], *inputs())
    assert report.rewrites == ()
