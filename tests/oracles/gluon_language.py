"""The Gluon language over `gluon_emulator.Machine`, and the run of a kernel's own source under it."""

from __future__ import annotations

import types
from typing import Any

import torch

from .gluon_emulator import Machine, Pointer


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> torch.Tensor:
    where, inside = pointer.at(mask)
    safe = torch.where(inside, where, 0)
    return torch.where(inside, pointer.flat[safe], torch.tensor(other, dtype=pointer.flat.dtype))


def _store(pointer: Pointer, value: torch.Tensor, mask: Any = None) -> None:
    where, inside = pointer.at(mask)
    pointer.flat[where[inside]] = value.to(pointer.flat.dtype).expand(where.shape)[inside]


def _assembly(text: str, constraints: str, arguments: list[torch.Tensor], **_: Any) -> Any:
    (x,) = arguments
    if "f16x2" in text:
        low = x.to(torch.bfloat16 if "bf16x2" in text else torch.float16)
        return (x - low.float() if "sub" in text else low.float()), low
    return {"ex2": torch.exp2, "mov": torch.clone}[text[:3]](x)


def _language(machine: Machine, grid: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        constexpr=lambda x: x, load=_load, store=_store, where=torch.where, exp=torch.exp, minimum=min, maximum=max,
        program_id=lambda axis: machine.program, num_programs=lambda axis: grid,
        cast=lambda x, dtype, bitcast=False: x.view(dtype) if bitcast else x, max=torch.amax,
        convert_layout=lambda x, layout: x, sum=torch.sum,
        inline_asm_elementwise=_assembly,
        associative_scan=lambda x, axis, add, reverse: x.flip(axis).cumsum(axis).flip(axis),
        arange=lambda a, b, layout=None: torch.arange(a, b), static_range=range, zeros_like=torch.zeros_like,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        SliceLayout=lambda dim, parent: None, allocate_shared_memory=machine.allocate,
        warp_specialize=machine.specialize, float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16,
        int32=torch.int32, int64=torch.int64,
    )  # fmt: skip


def _names(machine: Machine, grid: int) -> dict[str, Any]:
    """What a kernel's module knows besides `gl`."""
    barriers = types.SimpleNamespace(
        init=machine.init, expect=machine.expect, MBarrierLayout=lambda: "mbarrier",
        arrive=lambda barrier, count=1, pred=True: machine.arrive(barrier, count) if pred else None,
        wait=lambda barrier, parity: machine.wait(barrier.only(), int(parity)),
    )  # fmt: skip
    return {
        "gl": _language(machine, grid), "mbarrier": barriers,
        "tma": types.SimpleNamespace(store_wait=machine.store_wait),
        "fence_async_shared": lambda: None, "thread_barrier": machine.step, "copy_in": machine.copy_in,
        "copy_out": machine.copy_out, "warpgroup_mma": machine.mma, "warpgroup_mma_wait": machine.mma_wait,
        "warpgroup_mma_init": lambda value: value,
    }  # fmt: skip


def run(kernel: Any, grid: int, arguments: dict[str, Any], seed: int = 0) -> None:
    """Every program of `grid`, one after the other; tensors become pointers."""
    source = kernel.fn.__globals__
    values = {n: Pointer(v.view(-1)) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    for program in range(grid):
        world: dict[str, Any] = {}
        pending = [source]
        while pending:
            names = pending.pop()
            world = {**names, **world}
            bodies = (getattr(value, "fn", None) for value in names.values())
            pending += [
                f.__globals__
                for f in bodies
                if isinstance(f, types.FunctionType) and not world.keys() >= f.__globals__.keys()
            ]
        world.update({**source, **_names(Machine(seed * 7919 + program, program), grid)})
        for name, value in list(world.items()):
            if type(value).__name__ == "constexpr" and isinstance(value.value, int | str):
                world[name] = value.value
            body = getattr(value, "fn", None)
            if isinstance(body, types.FunctionType):
                world[name] = types.FunctionType(body.__code__, world, name, body.__defaults__)
        world[kernel.fn.__name__](**{n: values[n] for n in kernel.arg_names})
