"""ple_gdn: a torch.compile backend and op library for training Gated DeltaNet models.

Importing registers the ops `torch.ops.ple_gdn.*`; it patches nothing and touches no GPU.
"""

from __future__ import annotations

from .ops.gated_delta_rule.op import gated_delta_rule
from .ops.kcp.partition import kcp_partition
from .ops.kcp.planner import kcp_plan, kcp_plan_row
from .ops.varlen import Packing, prepare_varlen

__version__ = "0.1.0"

__all__ = ["Packing", "gated_delta_rule", "kcp_partition", "kcp_plan", "kcp_plan_row", "prepare_varlen"]
