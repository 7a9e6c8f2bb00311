"""ple_gdn: a torch.compile backend and op library for training Gated DeltaNet models.

Importing registers the ops `torch.ops.ple_gdn.*`; it patches nothing and touches no GPU.
"""

from __future__ import annotations

from .ops.gated_residual.op import gated_residual_down, gated_residual_inject, gated_residual_mix
from .ops.grouped_rms_norm.op import grouped_rms_norm
from .ops.kcp.partition import kcp_partition
from .ops.kcp.planner import kcp_plan, kcp_plan_row

__version__ = "0.1.0"

__all__ = [
    "gated_residual_down",
    "gated_residual_inject",
    "gated_residual_mix",
    "grouped_rms_norm",
    "kcp_partition",
    "kcp_plan",
    "kcp_plan_row",
]
