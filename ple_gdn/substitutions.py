"""Python functions of other libraries that Dynamo replaces by our ops before it traces them.

`torch_chunk_gated_delta_rule` unrolls one loop body per 64 tokens (a new graph for every length, minutes of compile),
and FLA's own function breaks the graph. `torch.compiler.substitute_in_graph` takes such a function over inside a trace:
eager calls never change, nothing is patched. It holds for the whole process, so another backend that compiles the same
model gets our op too; it is exact there as well.

A call that our ops do not cover traces the original function. The one exception is a packed call whose original would
drop the boundaries and let documents read each other: that raises.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch

from . import ops  # noqa: F401  (registers torch.ops.ple_gdn)
from .ops.torch_versions import is_exporting

Tensor = torch.Tensor

HEAD_WIDTHS = range(16, 257, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda", "meta")  # meta: `explain` of a model that is nowhere yet

# Keyword arguments of a transformers forward that say nothing to the chunk rule or to the convolution: transformers'
# own wrapper drops them. Their values are never looked at (an int such as max_length_q would be guarded: a recompile
# at every step).
IGNORED_BY_HF = frozenset(
    {
        "cache",
        "cache_params",
        "cache_position",
        "cu_seq_lens_k",
        "is_causal",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
PACKING_KEYWORDS = frozenset({"cu_seqlens", "cu_seq_lens_q", "seq_idx"})

# FLA keywords with the one value that our op implements; `cu_seqlens_cpu` and `chunk_indices` only repeat cu_seqlens.
FLA_NEUTRAL = {
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "state_v_first": False,
    "transpose_state_layout": False,
    "head_first": False,
    "cp_context": None,
    "A_log": None,
    "dt_bias": None,
    "chunk_size": 64,
}
FLA_REPEATED = frozenset({"cu_seqlens_cpu", "chunk_indices"})


def _supported_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None) -> bool:
    """Whether `gated_delta_rule` computes this call; shapes that it refuses as wrong are left to its own error."""
    for x in (q, k, v, g, beta):
        if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.device.type not in DEVICES:
            return False
    if not (q.dim() == k.dim() == v.dim() == 4) or not (q.dtype == k.dtype == v.dtype):
        return False
    if initial_state is not None and initial_state.dtype not in DTYPES:
        return False
    return (
        q.shape[-1] in HEAD_WIDTHS
        and v.shape[-1] in HEAD_WIDTHS
        and q.shape[2] == k.shape[2]
        and v.shape[2] % k.shape[2] == 0
        and not is_exporting()
    )


def _rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    outputs = torch.ops.ple_gdn.gated_delta_rule(
        q,
        k,
        v,
        g.float(),
        beta.float(),
        initial_state if initial_state is None else initial_state.float(),
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm,
        save_mode="light" if torch.is_grad_enabled() else "none",
    )
    return outputs[0], outputs[1] if output_final_state else None


def _given_boundaries(packing: dict[str, Any]) -> Tensor | None:
    """`cu_seqlens` as the caller gave it, under FLA's or the flattening collator's name."""
    cu_seqlens = packing.get("cu_seqlens")
    return packing.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens


def _split_keywords(kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The packing arguments among transformers' extra keywords, and the names of those that nobody here knows."""
    packing = {name: kwargs[name] for name in kwargs if name in PACKING_KEYWORDS and kwargs[name] is not None}
    known = PACKING_KEYWORDS | IGNORED_BY_HF
    return packing, [name for name in kwargs if name not in known and kwargs[name] is not None]


def _refuse_packed(name: str, packing: dict[str, Any], reason: str) -> None:
    """The original would ignore the boundaries on some releases; documents must never read each other."""
    if packing:
        given = ", ".join(sorted(packing))
        raise ValueError(f"{name}: cannot keep packed documents ({given}) apart: {reason}")


def _packed_rows(x: Tensor) -> Tensor:
    """[B,T,...] -> [1,B*T,...]: a document never spans two rows, so rows are just more boundaries."""
    return x if x.shape[0] == 1 else x.flatten(0, 1).unsqueeze(0)


def hf_chunk_rule(original: FunctionType) -> FunctionType:
    """`torch_chunk_gated_delta_rule` of a transformers modeling file."""

    def torch_chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        packing, unknown = _split_keywords(kwargs)
        if chunk_size != 64 or unknown or not _supported_rule(query, key, value, g, beta, initial_state):
            reason = f"unsupported arguments {', '.join(unknown)}" if unknown else "head widths, dtypes or chunk_size"
            _refuse_packed("torch_chunk_gated_delta_rule", packing, reason)
            return original(
                query,
                key,
                value,
                g=g,
                beta=beta,
                chunk_size=chunk_size,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **kwargs,
            )
        cu_seqlens, seq_idx = _given_boundaries(packing), packing.get("seq_idx")
        if packing and initial_state is not None:
            _refuse_packed("torch_chunk_gated_delta_rule", packing, "a cached state is continued")
        flags = (output_final_state, use_qk_l2norm_in_kernel)
        if cu_seqlens is not None or seq_idx is None:
            return _rule(query, key, value, g, beta, None, initial_state, *flags, cu_seqlens)
        batch, tokens = value.shape[:2]
        cu_seqlens = torch.ops.ple_gdn.document_boundaries(seq_idx, kind="seq_idx")
        flat = [_packed_rows(x) for x in (query, key, value, g, beta)]
        out, states = _rule(*flat, None, None, *flags, cu_seqlens)
        if states is not None:
            # What a cache holds for a row is the state after the row's last token, so that of its last document.
            row_ends = torch.arange(1, batch + 1, device=cu_seqlens.device, dtype=cu_seqlens.dtype) * tokens
            states = states[torch.searchsorted(cu_seqlens, row_ends) - 1]
        return out.reshape(value.shape), states

    return torch_chunk_gated_delta_rule


def hf_causal_conv1d(original: FunctionType) -> FunctionType:
    """`causal_conv1d_fn` of a transformers modeling file: hidden_states [B,D,T], weight [D,kernel]."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        packing, unknown = _split_keywords(kwargs)
        supported = (
            not unknown
            and activation in (None, "silu", "swish")
            and hidden_states.dtype in DTYPES
            and weight.dtype == hidden_states.dtype
            and (bias is None or bias.dtype == hidden_states.dtype)
            and hidden_states.device.type in DEVICES
            and not is_exporting()
        )
        if not supported:
            reason = f"unsupported arguments {', '.join(unknown)}" if unknown else "dtypes, activation or export"
            _refuse_packed("causal_conv1d_fn", packing, reason)
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        x, cu_seqlens = hidden_states.transpose(1, 2), _given_boundaries(packing)
        shape = x.shape
        if cu_seqlens is None and packing.get("seq_idx") is not None:
            cu_seqlens = torch.ops.ple_gdn.document_boundaries(packing["seq_idx"], kind="seq_idx")
            x = _packed_rows(x)
        silu = None if activation is None else "silu"
        out = torch.ops.ple_gdn.causal_conv1d(x, weight, bias, cu_seqlens, activation=silu)
        return out.reshape(shape).transpose(1, 2)

    return causal_conv1d_fn


def hf_recurrent_mask(original: FunctionType) -> FunctionType:
    """`masking_utils.create_recurrent_attention_mask`: the one place of a model that sees position ids beside the mask.

    Linear attention layers are never told of a flattening collator's position ids, so upstream lets its documents leak.
    The boundaries found here have no user; the pass `wire_packing` hands them to the layers of the same graph.
    """

    def create_recurrent_attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        position_ids, embeds = kwargs.get("position_ids"), kwargs.get("inputs_embeds")
        mask = args[2] if len(args) > 2 else kwargs.get("attention_mask")
        cached = kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None or len(args) > 3
        # transformers' own condition for a packed row (masking_utils._preprocess_mask_arguments).
        if isinstance(position_ids, Tensor) and position_ids.dim() == 2 and mask is None and not cached:
            if embeds is not None and position_ids.shape[0] != embeds.shape[0]:
                position_ids = position_ids.expand(embeds.shape[0], -1)
            torch.ops.ple_gdn.document_boundaries(position_ids, kind="position_ids")
        return original(*args, **kwargs)

    return create_recurrent_attention_mask


def fla_chunk_rule(original: FunctionType) -> FunctionType:
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule`, which FLA hides from Dynamo (one graph break a layer)."""

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        *args: Any,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        neutral = all(n in FLA_REPEATED or (n in FLA_NEUTRAL and kwargs[n] == FLA_NEUTRAL[n]) for n in kwargs)
        if args or not neutral or not _supported_rule(q, k, v, g, beta, initial_state):
            given = (q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, *args)
            return original(*given, cu_seqlens=cu_seqlens, **kwargs)
        flags = (output_final_state, use_qk_l2norm_in_kernel)
        return _rule(q, k, v, g, beta, scale, initial_state, *flags, cu_seqlens)

    return chunk_gated_delta_rule


@dataclass(frozen=True)
class Substitution:
    """`module.name` is replaced, inside a trace, by `build(copy of the original)`."""

    module: str
    name: str
    build: Callable[[FunctionType], FunctionType]


HF_FAMILIES = ("lara_mini", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp")


def _hf_module(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


SUBSTITUTIONS: tuple[Substitution, ...] = (
    *(Substitution(_hf_module(f), "torch_chunk_gated_delta_rule", hf_chunk_rule) for f in HF_FAMILIES),
    *(Substitution(_hf_module(f), "causal_conv1d_fn", hf_causal_conv1d) for f in HF_FAMILIES),
    Substitution("transformers.masking_utils", "create_recurrent_attention_mask", hf_recurrent_mask),
    Substitution("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule", fla_chunk_rule),
    Substitution("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", fla_chunk_rule),
)

_MODULES = frozenset(s.module for s in SUBSTITUTIONS)
# By identity, the function kept alive: a freed function's id could come back as another's.
_done: dict[int, FunctionType] = {}


def _copy_function(function: FunctionType) -> FunctionType:
    """Same code, closure and attributes, another identity: calling it inside a trace is not substituted again."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


def _functions_of(value: Any) -> list[FunctionType]:
    """The plain functions behind a module attribute: itself, or those that `kernels` hid in a module's forward."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, torch.nn.Module):
        cells = getattr(type(value).forward, "__closure__", None) or ()
        return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, FunctionType)]
    return []


def _substitute(module: ModuleType) -> None:
    for entry in SUBSTITUTIONS:
        if entry.module != module.__name__:
            continue
        for function in _functions_of(getattr(module, entry.name, None)):
            if id(function) in _done:
                continue
            replacement = entry.build(_copy_function(function))
            torch.compiler.substitute_in_graph(function, skip_signature_check=True)(replacement)
            _done[id(function)] = function


class _AfterImport:
    """Loader of a listed module: runs the real one, then substitutes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _substitute(module)


class _ListedModules:
    """Import finder that only ever answers for the modules of the table.

    A model may be imported after the backend, and `torch._dynamo.reset()` drops compile-start callbacks: an import is
    the one moment that cannot be missed.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _MODULES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is _ListedModules else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _AfterImport(spec.loader)
                return spec
        return None


def install_substitutions() -> None:
    """Serves every listed module, imported already or later. Idempotent; called when the backend module is entered."""
    if _ListedModules not in sys.meta_path:
        sys.meta_path.insert(0, _ListedModules)
    for name in _MODULES & set(sys.modules):
        _substitute(sys.modules[name])
