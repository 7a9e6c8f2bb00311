"""Gated delta rule: the raw ops `gated_delta_rule` and `gated_delta_rule_backward`, and the public front."""

from __future__ import annotations

from typing import Literal

import torch

from ..direct import cast_by_a_rule, recorded, unobserved
from ..kcp.context import KcpContext
from ..kcp.fronts import check_context, gated_delta_rule_over_ranks
from ..register import register_op
from ..triton_support import triton_ready
from ..validation import check_flag, check_number, check_tensor
from ..varlen import Packing, unpack_cu_seqlens
from . import reference
from .checks import check_backward_inputs, check_inputs, check_modes, passed_before, remember_passed
from .eager_regions import call_in_region, current_place, region_save_mode, requesting
from .tapes import KEPT, Tapes, document_count, new_tapes, state_dtype
from .workspace import backward_phase, check_workspace_bytes, needed_phases, sizes_of

REUSE_STRINGS: dict[bool | str, str] = {True: "hand_off", False: "replay", "auto": "auto"}


def _check_forward(*arguments: torch.Tensor | str | None) -> None:
    """Raises as the front's docstring says: the op's tensors, then save_mode and reuse_recompute_tapes."""
    *tensors, save_mode, reuse = arguments
    check_inputs(*tensors)
    check_modes(save_mode, reuse)
    q, _, v, _, _, _, cu_seqlens, _, workspace = tensors
    check_workspace_bytes(workspace, sizes_of(q, v, cu_seqlens), needed_phases(save_mode, reuse == "hand_off"))


def _check_backward(do: torch.Tensor, dfinal_state: torch.Tensor | None, *tensors: torch.Tensor | None) -> None:
    """Of the backward op's tensors."""
    q, _, v, _, _, _, cu_seqlens, _, workspace = inputs = tensors[:9]
    tapes = Tapes(*tensors[9:])
    check_inputs(*inputs)
    check_backward_inputs(do, dfinal_state, q, v, cu_seqlens, tapes)
    check_workspace_bytes(workspace, sizes_of(q, v, cu_seqlens), (backward_phase(tapes),))


def _forward_impl(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    save_mode: str = "light",
    reuse_recompute_tapes: str = "auto",
) -> tuple[torch.Tensor, ...]:
    arguments = (q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, workspace)
    if workspace is not None or not passed_before(*arguments, save_mode, reuse_recompute_tapes):
        _check_forward(*arguments, save_mode, reuse_recompute_tapes)
        remember_passed(*arguments, save_mode, reuse_recompute_tapes)
    if triton_ready(q.device):
        from .launch import launch_forward

        return launch_forward(*arguments, scale, output_final_state, use_qk_l2norm, save_mode)
    return reference.forward(
        *(q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets),
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm,
        save_mode=save_mode,
    )


def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    save_mode: str = "light",
    reuse_recompute_tapes: str = "auto",
) -> tuple[torch.Tensor, ...]:
    arguments = (q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, workspace)
    _check_forward(*arguments, save_mode, reuse_recompute_tapes)
    state = (document_count(q, cu_seqlens), v.shape[2], q.shape[3], v.shape[3]) if output_final_state else (0,)
    tapes = new_tapes(q, v, cu_seqlens, KEPT[save_mode])
    return (q.new_empty(v.shape), q.new_empty(state, dtype=state_dtype(q)), *tapes)


def _backward_impl(
    do: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None,
    workspace: torch.Tensor | None,
    gcum: torch.Tensor,
    k_rstd: torch.Tensor,
    qscale: torch.Tensor,
    x: torch.Tensor,
    h: torch.Tensor,
    delta: torch.Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[torch.Tensor, ...]:
    tapes = Tapes(gcum, k_rstd, qscale, x, h, delta)
    arguments = (do, dfinal_state, q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, workspace, *tapes)
    if workspace is not None or not passed_before(*arguments):
        _check_backward(*arguments)
        remember_passed(*arguments)
    if triton_ready(q.device):
        from .launch import launch_backward

        return launch_backward(*arguments, scale, use_qk_l2norm)
    return reference.backward(*arguments[:-6], tapes, scale=scale, use_qk_l2norm=use_qk_l2norm)


def _backward_fake(
    do: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None,
    workspace: torch.Tensor | None,
    gcum: torch.Tensor,
    k_rstd: torch.Tensor,
    qscale: torch.Tensor,
    x: torch.Tensor,
    h: torch.Tensor,
    delta: torch.Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[torch.Tensor, ...]:
    tensors = (do, dfinal_state, q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, workspace)
    _check_backward(*tensors, gcum, k_rstd, qscale, x, h, delta)
    state = (0,) if initial_state is None else initial_state.shape
    return (*(x.new_empty(x.shape) for x in (q, k, v, g, beta)), q.new_empty(state, dtype=state_dtype(q)))


gated_delta_rule_op = register_op("gated_delta_rule", _forward_impl, _forward_fake)
gated_delta_rule_backward_op = register_op("gated_delta_rule_backward", _backward_impl, _backward_fake)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, keyword_only_inputs: dict, output: tuple):
    _, final_state, *tapes = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*tapes, *(() if keyword_only_inputs["output_final_state"] else (final_state,)))
    *inputs, ctx.workspace = inputs
    # Scratch is not saved: hooks would copy it, and a write to it between the passes is none of autograd's business.
    ctx.save_for_backward(*inputs, *tapes)
    ctx.scale = keyword_only_inputs["scale"]
    ctx.use_qk_l2norm = keyword_only_inputs["use_qk_l2norm"]
    ctx.place = current_place()


def _autograd(
    ctx: torch.autograd.function.FunctionCtx,
    do: torch.Tensor | None,
    dfinal_state: torch.Tensor | None,
    *_: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    with requesting(ctx.place) as request:
        saved = ctx.saved_tensors  # once: a second read raises inside torch.utils.checkpoint
    q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, *tapes = saved
    if request.tapes is not None:
        tapes = request.tapes
    if do is None and dfinal_state is None:
        return (None,) * 9
    if do is None:
        do = q.new_zeros(()).expand(v.shape)
    *grads, dinitial_state = _run_backward(
        *(do, dfinal_state, q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, ctx.workspace, *tapes),
        scale=ctx.scale,
        use_qk_l2norm=ctx.use_qk_l2norm,
    )
    return (*grads, None if initial_state is None else dinitial_state, None, None, None)


gated_delta_rule_op.register_autograd(_autograd, setup_context=_setup_context)


class GatedDeltaRule(torch.autograd.Function):
    """The op without the dispatcher: the same implementation and formula. Tapes are saved and not returned.

    Named for its node, `GatedDeltaRuleBackward`, which anomaly mode and graph printers show.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, options: dict[str, object], *tensors: torch.Tensor | None):
        with recorded("gated_delta_rule"), torch._C._DisableAutocast():
            output = _forward_impl(*tensors, **options)
        _setup_context(ctx, tensors, options, output)
        return output[:2]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor | None):
        return (None, *_autograd(ctx, *grads))


def _as_the_schema_has(options: dict[str, object]) -> dict[str, object]:
    """Types of the schema, as the dispatcher hands them on: kernels are compiled for the type of a number."""
    scale, flags = options["scale"], ("output_final_state", "use_qk_l2norm")
    converted = {name: bool(options[name]) for name in flags}
    return {**options, **converted, "scale": None if scale is None else float(scale)}


def _run(*tensors: torch.Tensor | None, **options: object) -> tuple[torch.Tensor, ...]:
    """Output and final state of the op, and its tapes where it went through the dispatcher."""
    if not unobserved(tensors) or cast_by_a_rule("ple_gdn::gated_delta_rule"):
        return torch.ops.ple_gdn.gated_delta_rule(*tensors, **options)
    options = _as_the_schema_has(options)
    if torch.is_grad_enabled():
        return GatedDeltaRule.apply(options, *tensors)
    with recorded("gated_delta_rule"), torch._C._DisableAutocast():
        return _forward_impl(*tensors, **options)


def _run_backward(*tensors: torch.Tensor | None, **options: object) -> tuple[torch.Tensor, ...]:
    """The backward op. With create_graph it is one for certain: the op says that it has no derivative."""
    name = "ple_gdn::gated_delta_rule_backward"
    if torch.is_grad_enabled() or not unobserved(tensors) or cast_by_a_rule(name):
        return torch.ops.ple_gdn.gated_delta_rule_backward(*tensors, **options)
    with recorded("gated_delta_rule_backward"), torch._C._DisableAutocast():
        return _backward_impl(*tensors, **options)


def _check_front_options(
    save_mode: object, reuse_recompute_tapes: object, scale: object, flags: dict[str, object]
) -> None:
    """What the raw op cannot see: its strings and types differ from the front's."""
    if save_mode not in ("light", "full"):
        raise ValueError(f"save_mode: expected 'light' or 'full', got {save_mode!r}")
    if not (isinstance(reuse_recompute_tapes, bool) or reuse_recompute_tapes == "auto"):
        raise ValueError(f"reuse_recompute_tapes: expected True, False or 'auto', got {reuse_recompute_tapes!r}")
    if scale is not None:
        check_number("scale", scale)
    for name, flag in flags.items():
        check_flag(name, flag)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    cu_seqlens: torch.Tensor | Packing | None = None,
    save_mode: Literal["light", "full"] = "light",
    reuse_recompute_tapes: bool | Literal["auto"] = "auto",
    workspace: torch.Tensor | None = None,
    cp: KcpContext | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule (Yang, Kautz, Hatamizadeh, 2024), chunkwise, with an exact backward.

    Per document and value head, with state S of shape [K, V]: `S <- exp(g_t) S`, `u = beta_t (v_t - S^T k_t)`,
    `S <- S + k_t u^T`, `o_t = scale * S^T q_t`. Value head j reads key head `j // (HV / H)`.

    Args:
        q: `[B, T, H, K]` float32, bfloat16 or float16 (float64 on the CPU); K is 16 to 256 in steps of 16.
        k: as q. Its rows must have norm at most 1, or pass `use_qk_l2norm=True`: not checked.
        v: `[B, T, HV, V]`, q's dtype; HV is a multiple of H, V as K but independent of it.
        g: `[B, T, HV]` float32 (float64 with float64 q), log of the decay, at most 0. Values below -88 count as -88.
        beta: `[B, T, HV]`, float32, bfloat16 or float16 (float64 with float64 q), in [0, 2]; used in fp32 as given.
        scale: factor of q; default `K ** -0.5`.
        initial_state: `[N, HV, K, V]`, g's dtype, N documents (B without `cu_seqlens`); default zero. Differentiable.
        output_final_state: also return the state after the last token of every document.
        use_qk_l2norm: divide q and k by `sqrt(sum(x^2) + 1e-6)` over the head width, inside the op.
        cu_seqlens: boundaries of the documents packed in the one row (B = 1), `[N + 1]` int32 or int64, or the
            `Packing` of `prepare_varlen`. Rows after the last entry belong to no document: output 0, gradient 0.
        save_mode: "light" keeps four small tapes and `T // 2048 + 1` states for the backward, which replays the others
            span by span; "full" keeps one state per 64 tokens and one row of V per token and replays nothing. Gradients
            are bitwise equal.
        reuse_recompute_tapes: under activation checkpointing, True feeds the recompute's tapes to the backward, False
            lets the backward rebuild them, "auto" hands them over exactly where this call is proven to be the last of
            its region that saves tensors (`tape_decisions()`, or `explain` for compiled code, says why). Without a
            checkpoint it has no effect. Gradients are bitwise equal.
        workspace: `[bytes]` uint8 on q's device, at least `gdn_workspace_bytes(...)` (with `tokens=T` where rows follow
            the last document), starting at a multiple of 256 bytes of its storage: the scratch of forward and backward,
            written without a trace in autograd or in the schema. Nothing else may read it, and no two calls may use it
            at once.
        cp: a prepared `KcpContext`: the inputs are this rank's shard of its pack, `initial_state` the whole pack's;
            the final state is nonzero for documents that end on this rank. Then `cu_seqlens` must be None, and q not
            float64.

    Returns:
        `o` `[B, T, HV, V]` in q's dtype, and the final state `[N, HV, K, V]` in g's dtype or None.

    Raises:
        TypeError: a dtype or type that is not listed above, a DTensor included.
        ValueError: a shape, device, width, head count, option or `cu_seqlens` that is not listed above.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_tensor(name, tensor)
    for name, tensor in (("initial_state", initial_state), ("workspace", workspace)):
        if tensor is not None:
            check_tensor(name, tensor)
    flags = {"output_final_state": output_final_state, "use_qk_l2norm": use_qk_l2norm}
    _check_front_options(save_mode, reuse_recompute_tapes, scale, flags)
    boundaries, chunk_offsets = unpack_cu_seqlens(cu_seqlens)
    differentiable = (q, k, v, g, beta) if initial_state is None else (q, k, v, g, beta, initial_state)
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in differentiable)
    # In compiled code a pass of the joint graph decides instead.
    eager = wants_gradient and not torch.compiler.is_compiling()
    save_mode = save_mode if wants_gradient else "none"
    reuse = REUSE_STRINGS[reuse_recompute_tapes]
    if cp is not None:
        if workspace is not None:
            raise ValueError("workspace: expected None with cp=, whose ops allocate their own temporaries")
        if eager:
            save_mode = region_save_mode(q, v, save_mode, reuse, why_replay="context parallel ops hand nothing over")
        o, final_state = gated_delta_rule_over_ranks(
            *(q, k, v, g, beta),
            check_context(cp, "q", q, cu_seqlens),
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm=use_qk_l2norm,
            save_mode=save_mode,
        )
        return o, final_state if output_final_state else None
    tensors = (q, k, v, g, beta, initial_state, boundaries, chunk_offsets, workspace)
    options = {"scale": scale, **flags, "save_mode": save_mode, "reuse_recompute_tapes": reuse}
    o, final_state, *_ = call_in_region(_run, tensors, options) if eager else _run(*tensors, **options)
    return o, final_state if output_final_state else None
