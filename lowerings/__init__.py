"""Inductor lowerings of the ops, and how the code generated for them is built."""

from __future__ import annotations

from collections.abc import Callable

from .cpp_batches import register_cpp_batches
from .cpp_casts import keep_asked_roundings
from .gated_residual import register_gated_residual_lowerings
from .grouped_rms_norm import register_grouped_rms_norm_lowerings
from .inductor_costs import keep_dtype_rules
from .rounding import register_rounding_lowerings

# Each idempotent.
REGISTRARS: tuple[Callable[[], None], ...] = (
    register_cpp_batches,
    keep_asked_roundings,
    keep_dtype_rules,
    register_rounding_lowerings,
    register_gated_residual_lowerings,
    register_grouped_rms_norm_lowerings,
)


def register_lowerings() -> None:
    """Registers every lowering; called once, when the backend is entered."""
    for register in REGISTRARS:
        register()
