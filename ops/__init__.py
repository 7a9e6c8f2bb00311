"""Op library: importing registers every raw op; nothing here queries a GPU."""

from __future__ import annotations

from .causal_conv1d import op as causal_conv1d_op
from .document_boundaries import document_boundaries_op
from .gated_delta_rule import op as gated_delta_rule_op
from .gated_delta_rule import tapes_op as gated_delta_rule_tapes_op
from .gated_residual import op as gated_residual_op
from .grouped_rms_norm import op as grouped_rms_norm_op
from .kcp import gated_delta_rule as kcp_gated_delta_rule_op
from .kcp import halo as kcp_halo_op
from .kcp import shard as kcp_shard_op
from .ple import op as ple_op

__all__ = [
    "causal_conv1d_op",
    "document_boundaries_op",
    "gated_delta_rule_op",
    "gated_delta_rule_tapes_op",
    "gated_residual_op",
    "grouped_rms_norm_op",
    "kcp_gated_delta_rule_op",
    "kcp_halo_op",
    "kcp_shard_op",
    "ple_op",
]
