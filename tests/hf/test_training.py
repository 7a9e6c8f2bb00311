"""Unedited Hugging Face models train through `torch.compile(backend="ple_gdn")`, code generation included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ple_gdn
from hf import tiny
from hf.capture import Capture, fresh

pytest.importorskip("transformers")

# Code generation of one tiny layer takes seconds; `slow` runs the whole table.
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _forget() -> None:
    fresh()


def train(how: str, dtype: torch.dtype, checkpoint: bool, family: str = "qwen4_exp", **settings: Any) -> None:
    """One step in eager and one compiled, from the same parameters: close logits, and gradients within the bar."""
    overrides = settings.pop("overrides", {})
    model, ids = tiny.build(family, dtype, **overrides), tiny.tokens(2, 72)
    tiny.use_experts_that_compile(model)
    logits, grads = tiny.step(model, ids)
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tiny.compile_model(model, how, **settings)
    ours, our_grads = tiny.step(model, ids)
    assert our_grads.keys() == grads.keys()
    assert all(torch.isfinite(g).all() for g in our_grads.values())
    if dtype == FP32:
        torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)
        name, ratio = tiny.worst_gradient(our_grads, grads)
        assert ratio <= 1, (name, ratio)
    else:
        # Two BF16 runs that round alike up to a few last bits; a routing flip moves one token's logits.
        off = (ours.float() - logits.float()).abs()
        assert off.median() <= 4e-3


TABLE = [
    pytest.param(how, dtype, checkpoint, id=f"{how}-{str(dtype)[6:]}-{'checkpoint' if checkpoint else 'plain'}")
    for how in ("whole", "layers")
    for dtype in (FP32, BF16)
    for checkpoint in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "dtype", "checkpoint"), TABLE)
def test_qwen4_exp(how: str, dtype: torch.dtype, checkpoint: bool):
    train(how, dtype, checkpoint, fullgraph=True)


def test_one_compiled_layer_in_float32():
    overrides = {"num_hidden_layers": 1, "layer_types": [tiny.LINEAR], "ple_layer_ids": []}
    train("layers", FP32, False, fullgraph=True, overrides=overrides)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"])
def test_other_families(family: str):
    train("whole", FP32, False, family, fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "layers"])
def test_an_indexed_layer_keeps_its_graph_breaks_and_is_right(how: str):
    # Checkpoints say "full_attention"; the name of the type it stands for changed between releases.
    layers = {"layer_types": [tiny.LINEAR, tiny.LINEAR, tiny.LINEAR, "full_attention"]}
    indexer = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    train(how, FP32, False, overrides=layers | indexer | {"indexer_budget": 32, "indexer_compress_ratio": 4})


def test_what_is_rewritten_in_four_linear_layers_with_one_ple_block():
    model, capture = tiny.build(), Capture()
    tiny.compile_model(model, "whole", capture, fullgraph=True)
    with torch.no_grad():
        model(input_ids=tiny.tokens(1, 70), use_cache=False)
    expected = {
        "ple_gate_conv": 1,
        "gated_residual_mix": 9,
        "gated_residual_down": 9,
        "gated_residual_inject": 8,
        "gated_delta_rule": 4,
        "causal_conv1d": 4,
    }
    assert {op: capture.count(op) for op in expected} == expected
    assert not capture.records.refusals
    assert not capture.records.failures


@pytest.mark.slow
def test_packed_documents_through_the_backend_are_those_run_alone():
    from hf.test_packing import arguments, documents_of, positions

    model, ids, lengths = tiny.build(), tiny.tokens(1, 72), (20, 23, 29)
    tiny.use_experts_that_compile(model)
    alone, grads = tiny.step_alone(model, documents_of(ids, lengths))
    tiny.compile_model(model, "layers", fullgraph=True)
    first = positions(lengths) == 0
    logits, ours = tiny.step(model, ids, first, **arguments("cu_seq_lens_q", lengths))
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
    name, ratio = tiny.worst_gradient(ours, grads)
    assert ratio <= 1, (name, ratio)
    assert not ple_gdn.last_report().failures
