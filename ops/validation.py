"""Input checks shared by the ops. Each message names the argument, what was expected and what arrived."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

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
    check_strided(name, value)
    dual = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
    if _in_differentiating_transform() or (dual and forward_ad.unpack_dual(value).tangent is not None):
        raise TypeError(
            f"{name}: expected a tensor for reverse-mode autograd, got one of forward-mode AD or of a torch.func "
            "transform (grad, vjp, jvp, jacrev, ...); use torch.autograd.grad"
        )


def check_strided(name: str, value: torch.Tensor) -> None:
    """Raises TypeError for what has no single strided storage: an op that reads such memory by offsets corrupts it."""
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").removeprefix("_")
        raise TypeError(f"{name}: expected a dense tensor (torch.strided), got a {kind} one; pass {name}.to_dense()")


def _in_differentiating_transform() -> bool:
    """Whether a torch.func transform other than vmap is active.

    An opaque op has no forward-mode formula, and torch takes a missing tangent for zero without a word: jvp would be
    wrong, so the fronts refuse it.
    """
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() != torch._C._functorch.TransformType.Vmap


# What torch.compiler.assume_constant_result sets: Dynamo asks at trace time instead of tracing into the interpreter.
# Calling it here would import torch._dynamo with ple_gdn, a second and a half.
_in_differentiating_transform._dynamo_marked_constant = True


def check_int(name: str, value: object) -> None:
    """Raises TypeError unless `value` is an int, ValueError where the dispatcher cannot hold it: a schema's int has 64
    bits."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not isinstance(value, torch.SymInt) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected an int of 64 bits, -2**63 to 2**63 - 1, got {value}")


def check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, (int, torch.SymBool)):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")


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
