"""The published Qwen4-Exp modules: what is fused, where, and that outputs and gradients stay eager's."""

from __future__ import annotations

import collections

import pytest
import torch
from oracles.fusing import Fusing
from oracles.gated_residual import mismatches
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

EXPECTED = {
    "ple_gate_conv": 1,
    "grouped_rms_norm": 9,
    "gated_residual_mix": 9,
    "gated_residual_down": 9,
    "gated_residual_inject": 8,
}


def tiny_config(**changes) -> Qwen4ExpTextConfig:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "hc_count": 4,
        "hc_lowrank": 8,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 4,
        "ple_layer_ids": [2],
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "use_cache": False,
    }
    return Qwen4ExpTextConfig(**{**sizes, **changes})


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Upstream starts the PLE convolution and the norms at zero, which would hide most mistakes."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module


def gradients(module: torch.nn.Module, output: torch.Tensor, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {**dict(module.named_parameters()), **{f"input {i}": x for i, x in enumerate(inputs)}}
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(6)).to(output.dtype)
    grads = torch.autograd.grad(output, list(named.values()), upstream)
    return dict(zip(named, grads, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_whole_model_has_every_block_fused_and_nothing_refused(checkpointing):
    model = hf.Qwen4ExpForCausalLM(tiny_config()).bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(7))
    fusing = Fusing()
    fusing.compile(model)(input_ids=ids, use_cache=False)
    assert collections.Counter(fusing.ops()) == EXPECTED
    assert fusing.reasons() == []
    assert len(fusing.graphs) == 1
    where = {(rewrite.op, rewrite.where) for rewrite in fusing.records.rewrites}
    assert ("ple_gate_conv", "model.layers.1.ple") in where
    assert ("gated_residual_mix", "model.hyper_connection_mixer") in where
    assert ("gated_residual_inject", "model.layers.3") in where
    assert ("grouped_rms_norm", "model.layers.0.attn_hyper_connection.hc_norm") in where


@pytest.mark.parametrize("masked", [False, True])
def test_the_ple_layer_keeps_outputs_and_gradients(masked):
    layer = randomised(hf.Qwen4ExpTextPLELayer(tiny_config(), 1, 0))
    ids = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(8))
    mask = (torch.arange(20).expand(2, 20) < torch.tensor([[20], [13]])) if masked else None
    hidden = torch.randn(2, 20, 128, generator=torch.Generator().manual_seed(9), requires_grad=True)

    def step(hidden):
        return hidden + layer(hidden, ids, None, conv_mask=mask)

    fusing = Fusing()
    actual, expected = fusing.compile(step)(hidden), step(hidden)
    assert fusing.ops() == ["ple_gate_conv"]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    expected_grads = gradients(layer, expected, hidden)
    for name, grad in gradients(layer, actual, hidden).items():
        reference = expected_grads[name]
        assert (grad - reference).norm() <= 5e-5 * reference.norm(), name


def test_a_gated_residual_with_its_injection_keeps_the_bits_of_eager():
    module = randomised(hf.Qwen4ExpTextGatedResidual(tiny_config())).bfloat16()
    hyper = torch.randn(2, 7, 128, generator=torch.Generator().manual_seed(9)).bfloat16().requires_grad_()

    def step(hyper):
        hidden, hyper_input, weights = module(hyper)
        return hyper_input + (hidden.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)

    fusing = Fusing()
    actual, expected = fusing.compile(step)(hyper), step(hyper)
    assert len(fusing.ops()) == 4
    assert mismatches(actual.detach(), expected.detach()) == 0
    expected_grads = gradients(module, expected, hyper)
    for name, grad in gradients(module, actual, hyper).items():
        reference = expected_grads[name]
        if name == "hc_norm.weight":  # a sum over the rows, taken in another order
            torch.testing.assert_close(grad, reference, rtol=1e-2, atol=1e-3)
        else:
            assert mismatches(grad, reference) == 0, name
