"""No backward reads its saved tensors twice: inside torch.utils.checkpoint the second read raises."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ple_gdn

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = Path(ple_gdn.ops.__file__).parent
T, H, HV, K, N, C = 70, 1, 2, 16, 2, 16


def context() -> ple_gdn.KcpContext:
    part = ple_gdn.kcp_partition(torch.tensor([0, 30, T]), 1)
    return ple_gdn.build_kcp_context(part, None, 0, "cpu").prepare(H, HV)


def rule(cp: ple_gdn.KcpContext | None, q, k, v, g, beta, state):
    g, beta = -g.abs(), beta.sigmoid()
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm": True}
    bounds = None if cp is not None else torch.tensor([0, 30, T])
    return ple_gdn.gated_delta_rule(q, k, v, g, beta, cp=cp, cu_seqlens=bounds, **options)


RULE = ((1, T, H, K), (1, T, H, K), (1, T, HV, K), (1, T, HV), (1, T, HV), (2, HV, K, K))
PLE = ((1, T, N * C), (1, T, N * C), (1, T, C), (N * C,), (N * C,), (N * C,), (N * C, 1, 4))

# name -> (function of leaves, shapes of the leaves)
CALLS: dict[str, tuple[Callable, tuple]] = {
    "gated_delta_rule": (lambda *x: rule(None, *x), RULE),
    "gated_delta_rule cp": (lambda *x: rule(context(), *x), RULE),
    "ple_gate_conv": (lambda *x: ple_gdn.ple_gate_conv(*x, dilation=3), PLE),
    "ple_gate_conv cp": (lambda *x: ple_gdn.ple_gate_conv(*x, dilation=3, cp=context()), PLE),
    "causal_conv1d": (
        lambda x, w, b: ple_gdn.causal_conv1d(x, w, b, activation="silu"),
        ((1, T, C), (C, 4), (C,)),
    ),
    "causal_conv1d cp": (lambda x, w: ple_gdn.causal_conv1d(x, w, cp=context()), ((1, T, C), (C, 4))),
    "grouped_rms_norm": (lambda x, w: ple_gdn.grouped_rms_norm(x, w, group_size=C), ((3, N * C), (N * C,))),
    "gated_residual_down": (lambda x: ple_gdn.gated_residual_down(x, N), ((3, N * C),)),
    "gated_residual_mix": (lambda x, y: ple_gdn.gated_residual_mix(x, y, N), ((3, N * C), (3, N * C))),
    "gated_residual_inject": (ple_gdn.gated_residual_inject, ((3, C), (3, N * C), (3, N))),
    "kcp_scatter": (lambda x: ple_gdn.kcp_scatter(x, context()), ((1, T, C),)),
    "kcp_gather": (lambda x: ple_gdn.kcp_gather(x, context()), ((1, T, C),)),
}


def leaves_of(name: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in CALLS[name][1]]


def loss(outputs: torch.Tensor | tuple) -> torch.Tensor:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(output.square().sum() for output in outputs)


@pytest.mark.parametrize("name", CALLS)
def test_every_saved_tensor_is_unpacked_at_most_once(name: str) -> None:
    unpacked: Counter[int] = Counter()
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    def unpack(index: int) -> torch.Tensor:
        unpacked[index] += 1
        return packed[index]

    with saved_tensors_hooks(pack, unpack):
        outputs = CALLS[name][0](*leaves_of(name))
    loss(outputs).backward()
    assert all(count == 1 for count in unpacked.values()), unpacked
    assert len(unpacked) == len(packed)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_checkpointed_call_gives_the_bits_of_the_plain_one(name: str, early_stop: bool) -> None:
    function, leaves = CALLS[name][0], leaves_of(name)
    expected = torch.autograd.grad(loss(function(*leaves)), leaves)
    outputs = checkpoint(function, *leaves, use_reentrant=False, early_stop=early_stop)
    actual = torch.autograd.grad(loss(outputs), leaves)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def reads(source: str) -> list[tuple[str, int]]:
    """(function, reads of `.saved_tensors` in it; one in a loop counts as two) of those that read at all."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == "saved_tensors"]
        loops = [n for n in ast.walk(function) if isinstance(n, (ast.For, ast.While, ast.comprehension))]
        looped = sum(node in ast.walk(part) for loop in loops for part in _repeated(loop) for node in nodes)
        if nodes:
            found.append((function.name, len(nodes) + looped))
    return found


def _repeated(loop: ast.AST) -> list[ast.AST]:
    """What runs more than once: a for's iterable does not."""
    return [*loop.body] if isinstance(loop, ast.For) else [loop] if isinstance(loop, ast.While) else [*loop.ifs]


def test_no_function_of_the_ops_reads_saved_tensors_twice() -> None:
    found = {str(path.relative_to(OPS)): reads(path.read_text()) for path in OPS.rglob("*.py")}
    assert sum(map(len, found.values())) >= 8
    assert [(path, name) for path, all_reads in found.items() for name, count in all_reads if count > 1] == []
    twice = "def backward(ctx):\n    a = ctx.saved_tensors[0]\n    return a * ctx.saved_tensors[1]\n"
    looped = "def backward(ctx):\n    for i in range(2):\n        ctx.saved_tensors[i]\n"
    assert reads(twice) == [("backward", 2)]
    assert reads(looped) == [("backward", 2)]
