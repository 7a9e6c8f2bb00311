"""Gated residual: the three element-wise pieces of a hyper connection over N residual streams."""
