"""Tiny Hugging Face models of every family the backend serves, and what the tests ask of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB, EOS = 97, 3
LINEAR = "linear_attention"
# The second layer has the PLE block.
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": [LINEAR, LINEAR]}


def _qwen4_exp(**overrides: Any) -> nn.Module:
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    settings = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR] * 4,
        "hc_count": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [2],
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": 101,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    return Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**_common() | settings | overrides))


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "eos_token_id": EOS,
        "bos_token_id": EOS,
        "pad_token_id": EOS,
        "tie_word_embeddings": False,
        "use_cache": False,
        "max_position_embeddings": 4096,
    }


def _decoder(family: str, prefix: str, config: str, **overrides: Any) -> nn.Module:
    from importlib import import_module

    base = f"transformers.models.{family}"
    config_class = getattr(import_module(f"{base}.configuration_{family}"), config)
    model_class = getattr(import_module(f"{base}.modeling_{family}"), f"{prefix}ForCausalLM")
    settings = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "layer_types": [LINEAR, LINEAR, "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
    }
    return model_class(config_class(**_common() | settings | overrides))


EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

BUILDERS = {
    "qwen4_exp": _qwen4_exp,
    "qwen3_next": lambda **kw: _decoder("qwen3_next", "Qwen3Next", "Qwen3NextConfig", **EXPERTS, **kw),
    "qwen3_5": lambda **kw: _decoder("qwen3_5", "Qwen3_5", "Qwen3_5TextConfig", **kw),
    "qwen3_5_moe": lambda **kw: _decoder("qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeTextConfig", **EXPERTS, **kw),
    "olmo_hybrid": lambda **kw: _decoder("olmo_hybrid", "OlmoHybrid", "OlmoHybridConfig", **kw),
}


def build(family: str = "qwen4_exp", dtype: torch.dtype = torch.float32, **overrides: Any) -> nn.Module:
    """A seeded model in training mode; norm weights and PLE convolutions are random (upstream: constant at first)."""
    torch.manual_seed(0)
    model = BUILDERS[family](**overrides)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif ".ple.conv1d." in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).train()


def tokens(batch: int, length: int, seed: int = 0, eos: bool = False) -> torch.Tensor:
    """Random ids; without `eos` no document ends itself, so only the boundaries can reset the n-grams."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, length), generator=generator)
    return ids if eos else torch.where(ids == EOS, EOS + 1, ids)


def use_experts_that_compile(model: nn.Module) -> None:
    """Releases before 5.20: the backward of their float32 stand-in for a grouped matmul branches on data, so that no
    AOTAutograd backend compiles it."""
    import transformers

    old = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20)
    if old and next(model.parameters()).dtype == torch.float32:
        model.set_experts_implementation("batched_mm")


def compile_model(model: nn.Module, how: str, backend: Any = "ple_gdn", **kwargs: Any) -> nn.Module:
    """`how`: "whole" compiles the model in place, "layers" each decoder layer."""
    if how == "whole":
        model.compile(backend=backend, **kwargs)
    else:
        for layer in model.model.layers:
            layer.compile(backend=backend, **kwargs)
    return model


Step = tuple[torch.Tensor, dict[str, torch.Tensor]]


def step(model: nn.Module, ids: torch.Tensor, first: torch.Tensor | None = None, **kwargs: Any) -> Step:
    """Logits and every parameter's gradient of one next-token loss; `first` marks tokens that nothing predicts."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False, **kwargs).logits
    labels = ids if first is None else ids.masked_fill(first, -100)
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1)).backward()
    return logits.detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def step_alone(model: nn.Module, documents: list[torch.Tensor]) -> Step:
    """The same loss with each document [1,t] run alone in eager, gradients summed; logits [1,all tokens,vocabulary]."""
    model.zero_grad(set_to_none=True)
    count, outputs = sum(ids.shape[1] - 1 for ids in documents), []
    for ids in documents:
        logits = model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum") / count
        loss.backward()
        outputs.append(logits.detach())
    return torch.cat(outputs, 1), gradients(model)


def worst_gradient(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[str, float]:
    """The parameter furthest outside max(1e-4 |g|, 1e-7 |all g|), as a multiple of that bound."""
    assert ours.keys() == theirs.keys()
    whole = torch.stack([g.double().norm() for g in theirs.values()]).norm()
    worst = ("", 0.0)
    for name, reference in theirs.items():
        bound = torch.maximum(1e-4 * reference.double().norm(), 1e-7 * whole)
        ratio = float((ours[name].double() - reference.double()).norm() / bound)
        worst = max(worst, (name, ratio), key=lambda entry: entry[1])
    return worst
