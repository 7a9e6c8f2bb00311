"""Registration of one raw op: schema from the table, opaque implementation, fake, autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch._library import simple_registry
from torch.autograd import forward_ad

from .schemas import NAMESPACE, SCHEMAS
from .validation import check_strided, check_tensor


def _alone(name: str, impl: Callable) -> Callable:
    """`impl` as torch's modes must not change it.

    Autocast stays active inside a custom op's body: a reference's matmuls would silently run in 16 bits. Forward-mode
    AD takes the formula that an op does not have for a zero tangent, and shows a transform's tangent to nobody here.
    """

    @functools.wraps(impl)
    def run(*args, **kwargs):
        if forward_ad._current_level >= 0:
            raise TypeError(
                f"ple_gdn::{name} has no forward-mode derivative, and was called under forward-mode AD "
                "(torch.func.jvp, jacfwd, hessian or a dual level); use torch.autograd.grad"
            )
        with torch._C._DisableAutocast():
            return impl(*args, **kwargs)

    return run


def _argument_names(schema: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in torch._C.parse_schema(f"op{schema}").arguments)


def _of_strided(names: tuple[str, ...], function: Callable) -> Callable:
    """`function` behind a check that every tensor is strided: the one property that all checks and kernels build on."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                check_strided(name, value)
        return function(*args, **kwargs)

    return run


def register_op(name: str, impl: Callable, fake: Callable) -> torch.library.CustomOpDef:
    """Registers `torch.ops.ple_gdn.<name>` as an opaque custom op.

    `custom_op` and not `triton_op`: the latter decomposes under functionalisation, so joint-graph passes and lowerings
    would never see a node of ours (COMPILER.md H).
    """
    names = _argument_names(SCHEMAS[name])
    impl, fake = _of_strided(names, impl), _of_strided(names, fake)
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", _alone(name, impl), mutates_args=(), schema=SCHEMAS[name])
    op.register_fake(fake)
    entry = simple_registry.singleton.find(op._qualname)
    entry.torch_dispatch_rules = _RefusingDTensors(op._qualname)
    if name.endswith("_backward"):
        _refuse_second_derivatives(op, name.removesuffix("_backward"))
    return op


class _RefusingDTensors(simple_registry.GenericTorchDispatchRuleHolder):
    """The rules by which tensor subclasses run an op: DTensor's raises.

    `torch.library.register_torch_dispatch` wants the class itself, whose import costs half of ours again.
    """

    def find(self, torch_dispatch_class: type) -> Callable | None:
        if torch_dispatch_class.__name__ == "DTensor":
            return _refuse_dtensors
        return super().find(torch_dispatch_class)


def _refuse_dtensors(cls: type, op: torch._ops.OpOverload, types: tuple, args: tuple, kwargs: dict | None) -> None:
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | (kwargs or {})
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            check_tensor(name, value)


def _refuse_second_derivatives(op: torch.library.CustomOpDef, name: str) -> None:
    """Gives a backward op a derivative that raises: `create_graph=True` works until the second derivative is asked."""

    def refuse(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor | None) -> None:
        raise RuntimeError(
            f"ple_gdn.{name} has no second derivative: its backward, ple_gdn::{name}_backward, is not differentiable; "
            "compute gradients of gradients on a graph without it"
        )

    op.register_autograd(refuse)
