"""Every raw op `torch.ops.ple_gdn.*` with its full schema: the one table, pinned by `tests/ops/test_schemas.py`.

Rules the schemas follow:

* A public front `ple_gdn.<name>` is a thin validated wrapper over the raw op of the same name.
* Custom ops cannot return optional tensors: where a front returns None, the raw op returns an empty tensor.
* Tapes (what a backward needs beyond the inputs) are extra outputs, never differentiable.
* No op mutates or aliases its inputs, except that `workspace` is scratch: undefined before and after every call.
* Each backward is an op of its own, so a joint graph holds one forward and one backward node.
"""

from __future__ import annotations

NAMESPACE = "ple_gdn"

SCHEMAS: dict[str, str] = {
    # Gated delta rule. Tapes: gcum [B,T,HV] f32, k_rstd [B,T,H] f32, qscale [B,T,H] f32, x [B,T,HV,64], then only with
    # save_mode "full": h [NC_max,HV,K,V], delta [B,T,HV,V]. save_mode "light" has f32 start states in the place of
    # h, [(B T // 2048 + 1) HV V K] on one axis. save_mode "none" (inference) leaves all six empty.
    "gated_delta_rule": (
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
        "Tensor? chunk_offsets=None, Tensor? workspace=None, *, float? scale=None, bool output_final_state=False, "
        "bool use_qk_l2norm=False, str save_mode='light', str reuse_recompute_tapes='auto') -> "
        "(Tensor o, Tensor final_state, Tensor gcum, Tensor k_rstd, Tensor qscale, Tensor x, Tensor h, Tensor delta)"
    ),
    # Any tape may be empty: what is missing is rebuilt from the inputs ("replay"), with the same bits.
    "gated_delta_rule_backward": (
        "(Tensor do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
        "Tensor? initial_state, Tensor? cu_seqlens, Tensor? chunk_offsets, Tensor? workspace, "
        "Tensor gcum, Tensor k_rstd, Tensor qscale, Tensor x, Tensor h, Tensor delta, *, "
        "float? scale=None, bool use_qk_l2norm=False) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)"
    ),
    # All six tapes without the output: what a checkpoint region's hand-off runs next to its reader.
    "gated_delta_rule_tapes": (
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
        "Tensor? chunk_offsets=None, Tensor? workspace=None, *, float? scale=None, bool use_qk_l2norm=False) -> "
        "(Tensor gcum, Tensor k_rstd, Tensor qscale, Tensor x, Tensor h, Tensor delta)"
    ),
    # PLE. stats [5,B,T,N] f32 = gate, r_q, r_k, r_c, score (PLE.md); `residual` adds `hidden` to the result in fp32.
    "ple_gate_conv": (
        "(Tensor hidden, Tensor key, Tensor value, Tensor norm_key_weight, Tensor norm_query_weight, "
        "Tensor norm_conv_weight, Tensor conv_weight, Tensor? cu_seqlens=None, Tensor? conv_mask=None, *, "
        "int dilation, float eps=1e-6, int? workspace_bytes=None, bool residual=False) -> (Tensor out, Tensor stats)"
    ),
    "ple_gate_conv_backward": (
        "(Tensor dout, Tensor hidden, Tensor key, Tensor value, Tensor norm_key_weight, Tensor norm_query_weight, "
        "Tensor norm_conv_weight, Tensor conv_weight, Tensor? cu_seqlens, Tensor? conv_mask, Tensor stats, *, "
        "int dilation, float eps=1e-6, int? workspace_bytes=None, SymInt? chunk_rows=None, bool residual=False) -> "
        "(Tensor dhidden, Tensor dkey, Tensor dvalue, Tensor dnorm_key_weight, Tensor dnorm_query_weight, "
        "Tensor dnorm_conv_weight, Tensor dconv_weight)"
    ),
    "causal_conv1d": (
        "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? cu_seqlens=None, *, str? activation=None) -> Tensor y"
    ),
    "causal_conv1d_backward": (
        "(Tensor dy, Tensor x, Tensor weight, Tensor? bias=None, Tensor? cu_seqlens=None, *, str? activation=None) -> "
        "(Tensor dx, Tensor dweight, Tensor dbias)"
    ),
    # Marks of a packed row -> cu_seqlens int32 [tokens // 64 + 257], filled up with empty documents. No gradient.
    "document_boundaries": "(Tensor index, *, str kind) -> Tensor cu_seqlens",
    "grouped_rms_norm": "(Tensor x, Tensor weight, *, int group_size, float eps=1e-6) -> Tensor y",
    "grouped_rms_norm_backward": (
        "(Tensor dy, Tensor x, Tensor weight, *, int group_size, float eps=1e-6) -> (Tensor dx, Tensor dweight)"
    ),
    "gated_residual_down": "(Tensor x, int streams) -> Tensor y",
    "gated_residual_down_backward": "(Tensor dy, Tensor x, int streams) -> Tensor dx",
    "gated_residual_mix": "(Tensor up, Tensor normed, int streams) -> Tensor y",
    "gated_residual_mix_backward": (
        "(Tensor dy, Tensor up, Tensor normed, int streams) -> (Tensor dup, Tensor dnormed)"
    ),
    "gated_residual_inject": "(Tensor hidden, Tensor hyper_input, Tensor weights) -> Tensor y",
    "gated_residual_inject_backward": (
        "(Tensor dy, Tensor hidden, Tensor weights) -> (Tensor dhidden, Tensor dweights)"
    ),
    # Context parallelism. table: the rank's plan (CPU int64); segments, chunk_offsets: its local segments; map_rows
    # [2 + n]: n segments need a map, only the length matters; pack: the pack's cu_seqlens. maps: flat, 2 spare.
    "kcp_gated_delta_rule": (
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor pack, Tensor table, "
        "Tensor segments, Tensor chunk_offsets, Tensor map_rows, *, float? scale=None, "
        "bool output_final_state=False, bool use_qk_l2norm=False, str save_mode='light', str group_name='', "
        "str exchange='ring') -> (Tensor o, Tensor final_state, Tensor starts, Tensor maps, Tensor gcum, "
        "Tensor k_rstd, Tensor qscale, Tensor x, Tensor h, Tensor delta)"
    ),
    "kcp_gated_delta_rule_backward": (
        "(Tensor do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
        "Tensor? initial_state, Tensor pack, Tensor table, Tensor segments, Tensor chunk_offsets, Tensor starts, "
        "Tensor maps, Tensor gcum, Tensor k_rstd, Tensor qscale, Tensor x, Tensor h, Tensor delta, *, "
        "float? scale=None, bool use_qk_l2norm=False, str group_name='', str exchange='ring') -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)"
    ),
    "kcp_halo": "(Tensor x, Tensor table, Tensor fragments, int halo, str group_name) -> Tensor y",
    "kcp_halo_backward": "(Tensor dy, Tensor table, Tensor fragments, int halo, str group_name) -> Tensor dx",
    "kcp_gather": ("(Tensor rows, Tensor table, Tensor positions, SymInt total, str group_name) -> Tensor pack"),
}
