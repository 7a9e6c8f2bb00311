"""Fuzzes the gated residual ops and `ple_gdn.grouped_rms_norm`: bits of eager, and the same chains in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from fuzz_runs import main
from harness import Failure, Source, Tally, rms, same_bits
from oracles import gated_residual as eager
from torch import Tensor

import ple_gdn

LOW = (torch.float32, torch.bfloat16, torch.float16)
# Allowed root mean square of the error over that of the value. Wide for 16 bits, where eager itself rounds the sigmoid
# before it takes 1 - sigmoid: there the bits of eager are the measure.
BUDGETS = {torch.float32: 2e-6, torch.bfloat16: 0.1, torch.float16: 0.02}
SMALLEST = 0.02
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 6e-8, -1e-30, 65504.0, 3e38)


def _values(source: Source, shape: tuple[int, ...], dtype: torch.dtype, special: bool) -> Tensor:
    values = source.normal(*shape) * source.choice((1.0, 0.1, 8.0))
    if special:
        for value in SPECIAL:
            values = torch.where(source.uniform(*shape) < 0.05, value, values)
    return values.to(dtype)


def _make(source: Source, op: str) -> tuple[dict[str, Tensor], Callable, Callable, bool]:
    """Arguments by name, the op, the eager chain, whether infinities and NaN are among the values."""
    pick = source.pick
    rows = tuple(pick.choice((0, 1, 2, 3, 5, 9)) for _ in range(pick.randint(0, 3)))
    shape = source.structure
    streams, width = shape.randint(2, 8), source.choice((shape.randint(1, 9), shape.randint(10, 130)), structure=True)
    if op == "norm":
        width += 3  # one channel's norm is a sign: its gradient is the rounding of terms that cancel
    special = source.chance(0.1)
    eps = source.choice((1e-6, 1e-5, 1e-2))
    shapes = {
        "down": {"x": (*rows, width)},
        "mix": {"up": (*rows, streams * width), "normed": (*rows, streams * width)},
        "inject": {"hidden": (*rows, width), "hyper_input": (*rows, streams * width), "weights": (*rows, streams)},
        "norm": {"x": (*rows, streams * width), "weight": (streams * width,)},
    }[op]
    uniform = source.choice(LOW, structure=True) if shape.random() < 0.6 else None
    arguments = {
        n: source.guarded(n, _values(source, sizes, uniform or source.choice(LOW, structure=True), special))
        for n, sizes in shapes.items()
    }
    ours, theirs = {
        "down": (
            lambda x: ple_gdn.gated_residual_down(x, streams),
            lambda x: eager.down(x, streams),
        ),
        "mix": (
            lambda up, normed: ple_gdn.gated_residual_mix(up, normed, streams),
            lambda up, normed: eager.mix(up, normed, streams),
        ),
        "inject": (ple_gdn.gated_residual_inject, eager.inject),
        "norm": (
            lambda x, weight: ple_gdn.grouped_rms_norm(x, weight, group_size=width, eps=eps),
            lambda x, weight: _norm(x, weight, width, eps),
        ),
    }[op]
    return arguments, ours, theirs, special


def _norm(x: Tensor, weight: Tensor, width: int, eps: float) -> Tensor:
    if x.dtype == torch.float64:
        groups = x.unflatten(-1, (-1, width))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * (1.0 + weight)
    return eager.grouped_rms_norm(x, weight, width, eps)


def _with_gradients(fn: Callable, arguments: list[Tensor], wanted: list[int], dy: Tensor | None) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(at in wanted) for at, x in enumerate(arguments)]
    y = fn(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [leaves[at] for at in wanted], dy.to(y.dtype))]


def _bits_are_eagers(op: str, dtypes: list[torch.dtype], device: torch.device) -> bool:
    """Everywhere on the CPU; on a GPU wherever the value is rounded to 16 bits and no long sum was taken."""
    if device.type == "cpu":
        return True
    return op in ("down", "mix") and all(dtype != torch.float32 for dtype in dtypes)


def _judge(
    tally: Tally, name: str, op: str, results: tuple[list, list, list], exact: bool, allowed: float | None
) -> None:
    """`allowed`: of the float64 oracle; None leaves it out."""
    for at, (got, theirs, want) in enumerate(zip(*results, strict=True)):
        tally.compared += 1
        passed_on = op == "inject" and at > 0  # hyper_input's gradient is the upstream gradient itself
        if got.dtype != theirs.dtype or got.shape != theirs.shape or not (passed_on or got.is_contiguous()):
            tally.failures.append(Failure(name, f"{op} {at}", f"{got.dtype} {tuple(got.shape)} {got.stride()}"))
        elif exact and not same_bits(got, theirs):
            differ = int((got != theirs).sum())
            tally.failures.append(Failure(name, f"{op} {at}", f"{differ} of {got.numel()} values have other bits"))
        elif allowed is not None and got.numel():
            share = rms(got.cpu().double() - want) / max(rms(want), SMALLEST) / allowed
            tally.note(f"{op} {at}", share)
            if not share <= 1:
                tally.failures.append(Failure(name, f"{op} {at}", f"{share:.2f} of the allowed error"))


def _one(tally: Tally, source: Source, place: str) -> None:
    op = source.choice(("down", "mix", "inject", "norm"), structure=True)
    arguments, ours, theirs, special = _make(source, op)
    tensors = list(arguments.values())
    dtypes = [x.dtype for x in tensors]
    wanted = [at for at in range(len(tensors)) if source.chance(0.8)] or [0]
    dy = source.gradient("dy", theirs(*tensors))
    got = _with_gradients(ours, tensors, wanted, dy)
    eagers = _with_gradients(theirs, tensors, wanted, dy)
    exact = _with_gradients(theirs, [x.cpu().double() for x in tensors], wanted, dy.cpu())
    name = f"{place} {op} {[str(d)[6:] for d in dtypes]} {[tuple(x.shape) for x in tensors]} grads {wanted}"
    allowed = None if special else max(BUDGETS[dtype] for dtype in dtypes)
    _judge(tally, name, op, (got, eagers, exact), _bits_are_eagers(op, dtypes, source.device), allowed)
    for touched in source.touched():
        tally.failures.append(Failure(name, touched, "written, or its guard was"))
    tally.guards += source.guards
    tally.kinds[op + (" with infinities and NaN" if special else "")] += 1
    tally.cases += 1


def fuzz(tally: Tally, seed: int, group: int, device: torch.device) -> None:
    """A group is a single case."""
    _one(tally, Source("gated residual", seed, group, device=device), f"seed {seed} group {group} case 0")


if __name__ == "__main__":
    main(fuzz)
