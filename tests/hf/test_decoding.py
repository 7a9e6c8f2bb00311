"""Cached decoding of a model that was trained through the backend."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers.models.qwen4_exp")

from hf import tiny

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def test_a_trained_model_decodes_with_a_cache_as_its_eager_copy_and_as_a_full_forward() -> None:
    # The cache counts its tokens in an attention layer.
    kinds = [tiny.LINEAR, tiny.LINEAR, "full_attention"]
    # A budget past every length: no token stands or falls with the order of two equal scores.
    indexer = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_compress_ratio": 4}
    model = tiny.build(num_hidden_layers=3, layer_types=kinds, use_cache=True, indexer_budget=128, **indexer)
    tiny.use_experts_that_compile(model)
    fresh = copy.deepcopy(model)
    for layer in model.model.layers[:2]:
        layer.compile(backend="ple_gdn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = [p.detach().clone() for p in model.parameters()]
    for seed in range(2):
        tiny.step(model, tiny.tokens(1, 70, seed=seed))
        optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    fresh.load_state_dict(model.state_dict())
    prompt = tiny.tokens(1, 66, seed=5)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "use_cache": True}
    with torch.no_grad():
        ours, theirs = (
            m.eval().generate(prompt, attention_mask=torch.ones_like(prompt), **settings) for m in (model, fresh)
        )
        assert ours.shape[1] == 74
        assert torch.equal(ours, theirs)
        whole = model(input_ids=ours, use_cache=False).logits
        state = model(input_ids=ours[:, :66], use_cache=True)
        stepped, cache = [state.logits], state.past_key_values
        for t in range(66, 74):
            state = model(input_ids=ours[:, t : t + 1], past_key_values=cache, use_cache=True)
            stepped.append(state.logits)
    torch.testing.assert_close(torch.cat(stepped, 1), whole, rtol=1e-4, atol=1e-4)
