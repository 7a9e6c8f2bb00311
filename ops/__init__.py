"""Op library: importing registers every raw op; nothing here queries a GPU."""

from .gated_delta_rule import op as gated_delta_rule_ops

__all__ = ["gated_delta_rule_ops"]
