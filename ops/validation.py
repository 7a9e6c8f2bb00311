"""Input checks shared by the ops. Each message names the argument, what was expected and what arrived."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LOW_PRECISION = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *LOW_PRECISION)


def _dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_tensor(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a plain tensor (a DTensor is refused by name: it would shard silently)."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if type(value).__name__ == "DTensor":
        raise TypeError(f"{name}: expected a plain tensor, got a DTensor; pass {name}.to_local()")


def check_rank(name: str, value: torch.Tensor, rank: int, layout: str) -> None:
    if value.dim() != rank:
        raise ValueError(f"{name}: expected {rank} dimensions {layout}, got shape {tuple(value.shape)}")


def check_shape(name: str, value: torch.Tensor, shape: tuple, layout: str) -> None:
    if value.dim() != len(shape) or any(a != b for a, b in zip(value.shape, shape, strict=True)):
        raise ValueError(f"{name}: expected shape {tuple(shape)} {layout}, got {tuple(value.shape)}")


def check_dtype(name: str, value: torch.Tensor, dtypes: Iterable[torch.dtype]) -> None:
    dtypes = tuple(dtypes)
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {_dtype_names(dtypes)}, got {_dtype_names((value.dtype,))}")


def check_device(name: str, value: torch.Tensor, device: torch.device, reference: str) -> None:
    if value.device != device:
        raise ValueError(f"{name}: expected device {device} (that of {reference}), got {value.device}")
