"""Grouped zero-centred RMSNorm."""
