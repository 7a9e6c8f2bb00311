"""C++ code generation keeps a rounding that a lowering asked for, on releases of torch where it would drop it.

Torch 2.11 remembers for every fp32 value cast to 16 bits that casting back gives the fp32 value again, even where the
cast says `use_compute_types=False`, which means "round here" (4,093 of 4,096 results wrong). Later releases remember it
for other casts alone; so does this module. Inductor itself asks for no such cast on a C++ device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor.codegen import cpp
from torch._inductor.virtualized import V

from ..ops.torch_versions import casts_are_cached


def _keep_roundings(overrides: type) -> None:
    merging = overrides.to_dtype
    if hasattr(merging, "__wrapped__"):
        return

    @functools.wraps(merging)
    def to_dtype(
        x: Any, dtype: torch.dtype, src_dtype: torch.dtype | None = None, use_compute_types: bool = True
    ) -> Any:
        if use_compute_types:
            return merging(x, dtype, src_dtype, use_compute_types)
        src_dtype = x.dtype if src_dtype is None else src_dtype
        value = V.kernel.cse.generate(V.kernel.compute, V.kernel.get_to_dtype_expr(x, dtype, src_dtype))
        value.update_on_args("to_dtype", (x, dtype), {"src_dtype": src_dtype})
        return value

    overrides.to_dtype = staticmethod(to_dtype)


def keep_asked_roundings() -> None:
    """Does what newer releases do by themselves; nothing on those."""
    if casts_are_cached():
        _keep_roundings(cpp.CppOverrides)
        _keep_roundings(cpp.CppVecOverrides)
