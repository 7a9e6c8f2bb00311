"""Graph passes of the backend, in the order they run."""

from __future__ import annotations

from . import apply_options
from .records import GraphPass

# Left out with options={"fuse": False}.
FUSIONS: tuple[GraphPass, ...] = ()

# Stage "dynamo" runs before autograd, stage "joint" on the functionalised forward and backward.
PASSES: tuple[GraphPass, ...] = (
    *FUSIONS,
    apply_options.PASS,
)
