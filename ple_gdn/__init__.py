"""ple_gdn: a torch.compile backend and op library for training Gated DeltaNet models.

Importing registers the ops `torch.ops.ple_gdn.*`; it patches nothing and touches no GPU.
"""

from __future__ import annotations

from .explain import CapturedGraphs, capture_graphs, explain
from .memory import MemoryTimeline, plot_memory
from .ops.causal_conv1d.op import causal_conv1d
from .ops.gated_delta_rule.op import gated_delta_rule
from .ops.gated_delta_rule.tape_decisions import TapeDecision, last_tape_decision, tape_decisions
from .ops.gated_delta_rule.workspace import gdn_saved_bytes, gdn_workspace_bytes, gdn_workspace_layout
from .ops.gated_residual.op import gated_residual_down, gated_residual_inject, gated_residual_mix
from .ops.grouped_rms_norm.op import grouped_rms_norm
from .ops.kcp.context import KcpContext, build_kcp_context
from .ops.kcp.partition import kcp_partition
from .ops.kcp.planner import kcp_plan, kcp_plan_row
from .ops.kcp.shard import kcp_gather, kcp_scatter
from .ops.kcp.view import kcp_plan_view
from .ops.ple.op import ple_gate_conv
from .ops.varlen import Packing, prepare_varlen
from .report import Report, compile_reports, last_report, merge_reports

__version__ = "0.1.0"

__all__ = [
    "CapturedGraphs",
    "KcpContext",
    "MemoryTimeline",
    "Packing",
    "Report",
    "TapeDecision",
    "build_kcp_context",
    "capture_graphs",
    "causal_conv1d",
    "compile_reports",
    "explain",
    "gated_delta_rule",
    "gated_residual_down",
    "gated_residual_inject",
    "gated_residual_mix",
    "gdn_saved_bytes",
    "gdn_workspace_bytes",
    "gdn_workspace_layout",
    "grouped_rms_norm",
    "kcp_gather",
    "kcp_partition",
    "kcp_plan",
    "kcp_plan_row",
    "kcp_plan_view",
    "kcp_scatter",
    "last_report",
    "last_tape_decision",
    "merge_reports",
    "ple_gate_conv",
    "plot_memory",
    "prepare_varlen",
    "tape_decisions",
]
