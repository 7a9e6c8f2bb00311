"""Inductor lowerings of the ops."""

from __future__ import annotations

from collections.abc import Callable

# One `register_*()` per system, each idempotent.
REGISTRARS: tuple[Callable[[], None], ...] = ()


def register_lowerings() -> None:
    """Registers every lowering; called once, when the backend is entered."""
    for register in REGISTRARS:
        register()
