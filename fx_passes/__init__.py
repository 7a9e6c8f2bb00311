"""Graph passes of the backend, in the order they run."""

from __future__ import annotations

from . import (
    apply_options,
    chunk_token_sums,
    chunked_backward,
    fuse_gated_residual,
    fuse_grouped_rms_norm,
    fuse_ple,
    record_substitutions,
    rounding_boundaries,
    tape_reuse,
    wire_packing,
)
from .records import GraphPass

# Left out with options={"fuse": False}.
FUSIONS: tuple[GraphPass, ...] = (
    fuse_ple.PASS,
    fuse_grouped_rms_norm.PASS,
    fuse_gated_residual.MIX,
    fuse_gated_residual.DOWN,
    fuse_gated_residual.INJECT,
)

# Stage "dynamo" runs before autograd, stage "joint" on the functionalised forward and backward.
PASSES: tuple[GraphPass, ...] = (
    record_substitutions.PASS,
    *FUSIONS,
    wire_packing.PASS,
    apply_options.PASS,
    tape_reuse.PASS,
    chunked_backward.PASS,
    # Before the gated residual ops are written out as chains whose roundings are marked.
    chunk_token_sums.PASS,
    rounding_boundaries.PASS,
)
