"""Registration of one raw op: schema from the table, opaque implementation, fake, autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .schemas import NAMESPACE, SCHEMAS


def _without_autocast(impl: Callable) -> Callable:
    """Autocast stays active inside a custom op's body: a reference's matmuls would silently run in 16 bits."""

    @functools.wraps(impl)
    def run(*args, **kwargs):
        with torch._C._DisableAutocast():
            return impl(*args, **kwargs)

    return run


def register_op(name: str, impl: Callable, fake: Callable) -> torch.library.CustomOpDef:
    """Registers `torch.ops.ple_gdn.<name>` as an opaque custom op.

    `custom_op` and not `triton_op`: the latter decomposes under functionalisation, so joint-graph passes and lowerings
    would never see a node of ours (COMPILER.md H).
    """
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", _without_autocast(impl), mutates_args=(), schema=SCHEMAS[name])
    op.register_fake(fake)
    return op
