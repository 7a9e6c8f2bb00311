"""Inductor lowerings of the ops."""
