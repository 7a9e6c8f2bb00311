"""Inductor lowerings of the ops."""

from __future__ import annotations

from collections.abc import Callable

from .gated_residual import register_gated_residual_lowerings
from .grouped_rms_norm import register_grouped_rms_norm_lowerings
from .rounding import register_rounding_lowerings

# One `register_*()` per system, each idempotent.
REGISTRARS: tuple[Callable[[], None], ...] = (
    register_rounding_lowerings,
    register_gated_residual_lowerings,
    register_grouped_rms_norm_lowerings,
)


def register_lowerings() -> None:
    """Registers every lowering; called once, when the backend is entered."""
    for register in REGISTRARS:
        register()
