"""Which ops of a tiny Qwen4-Exp still differ from eager in BF16 under `rounding="eager_all"`: every one, by itself.

    python benchmarks/rounding_trace.py [--hidden 64] [--length 72] [--rounding eager_all] [--csv trace.csv]

Each call in the graphs of two decoder layers (the second has the PLE block) is compiled alone on the values that eager
gives it, forward and backward with a random upstream gradient, and its bits are compared with eager's. The functions
that the backend takes over whole are compared with Hugging Face's own. What is not listed has the bits of eager.
Last comes the model: both layers compiled, against eager, and against an eager run in which only the listed ops and
functions are the compiled ones. If that run has the bits of the compiled layers, the list is complete.
"""

from __future__ import annotations

import argparse
import csv
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

import ple_gdn.backend  # noqa: F401  (takes functions over, as in any compiled model)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from hf import tiny  # (found through the line above)

COLUMNS = ("op", "inputs", "calls", "outputs differing", "gradients differing")


@dataclass
class Call:
    """One kind of call: what it runs, the first values it got, and how often it came."""

    name: str
    function: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    count: int = 0

    @property
    def inputs(self) -> str:
        return " ".join(describe(x) for x in self.leaves if isinstance(x, Tensor))

    def run(self, *leaves: Any) -> list[Tensor]:
        # Calls in place (`x /= y`, `x[i] = y`) write to a copy, as they do to an intermediate in the model.
        args, kwargs = pytree.tree_unflatten([x.clone() if isinstance(x, Tensor) else x for x in leaves], self.spec)
        result = self.function(*args, **kwargs)
        return [x for x in pytree.tree_leaves(args[0] if result is None else result) if isinstance(x, Tensor)]


def plain(x: Any) -> Any:
    """Without the graph's immutable lists, which Dynamo does not take."""
    return type(x)(map(plain, x)) if type(x) is tuple else [plain(y) for y in x] if isinstance(x, list) else x


def describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]"


@dataclass
class Method:
    name: str

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, self.name)(*args, **kwargs)


def assign(x: Tensor, where: Any, value: Any) -> None:
    """`operator.setitem`, which Dynamo takes only in this spelling."""
    x[where] = value


def copy_of(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


class EachCall(fx.Interpreter):
    """Runs a graph in eager, every call through `visit(key, call)`, which returns what runs in its place."""

    def __init__(self, graph: fx.GraphModule, visit: Callable[[str, Call], Callable[..., Any]]) -> None:
        super().__init__(graph)
        self.visit = visit

    def _run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = plain(args), {name: plain(value) for name, value in kwargs.items()}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = f"{name}({', '.join(describe(x) if isinstance(x, Tensor) else repr(x) for x in leaves)})"
        return self.visit(key, Call(name, function, leaves, spec))(*args, **kwargs)

    def call_function(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(target, "__name__", str(target))
        return self._run(name, assign if target is operator.setitem else target, args, kwargs)

    def call_method(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(target, Method(target), args, kwargs)


def step(args: argparse.Namespace, **how: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of the two layers, compiled as `how` says."""
    layers = {"num_hidden_layers": 2, "layer_types": [tiny.LINEAR] * 2}
    model = tiny.build(dtype=torch.bfloat16, hidden_size=args.hidden, ple_embed_dim=args.hidden, **layers)
    torch._dynamo.reset()
    if how:
        for layer in model.model.layers:
            layer.compile(fullgraph=True, **how)
    return tiny.step(model, tiny.tokens(2, args.length))


def record(args: argparse.Namespace) -> dict[str, Call]:
    calls: dict[str, Call] = {}

    def keep(key: str, call: Call) -> Callable[..., Any]:
        if key not in calls:
            leaves = [copy_of(x) if isinstance(x, Tensor) else x for x in call.leaves]
            calls[key] = Call(call.name, call.function, leaves, call.spec)
        calls[key].count += 1
        return call.function

    step(args, backend=lambda graph, _inputs: EachCall(graph, keep).run)
    return calls


def step_with_listed_ops(args: argparse.Namespace, listed: set[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Eager, but the listed ops compiled one by one, and the functions that are taken over as they are."""
    compiled: dict[str, Callable[..., Any]] = {}
    torch._dynamo.config.recompile_limit = 8 * len(listed)  # two methods share one piece of code here

    def choose(key: str, call: Call) -> Callable[..., Any]:
        if key not in listed or call.name in TAKEN_OVER:
            return call.function
        if key not in compiled:
            options = {"rounding": args.rounding}
            compiled[key] = torch.compile(call.function, backend="ple_gdn", fullgraph=True, options=options)
        return compiled[key]

    return step(args, backend=lambda graph, _inputs: EachCall(graph, choose).run)


def outcome(run: Callable[..., list[Tensor]], leaves: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of the inputs that have one in the model, for a seeded upstream gradient."""
    leaves = [copy_of(x) if isinstance(x, Tensor) else x for x in leaves]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    outputs = run(*leaves)
    differentiable = [x for x in outputs if x.requires_grad]
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in differentiable]
    gradients = torch.autograd.grad(differentiable, wanted, upstream, allow_unused=True) if differentiable else ()
    return outputs, [g for g in gradients if g is not None]


def fraction(ours: list[Tensor], eager: list[Tensor]) -> float:
    assert [x.shape for x in ours] == [x.shape for x in eager]
    differing = sum(((a != b) & ~(a.isnan() & b.isnan())).sum().item() for a, b in zip(ours, eager, strict=True))
    return differing / max(sum(x.numel() for x in eager), 1)


def rule_of_eager(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any, **kwargs: Any) -> Tensor:
    normalised = kwargs["use_qk_l2norm"]
    return modeling.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normalised)[0]


def convolution_of_eager(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any, **kwargs: Any) -> Tensor:
    return modeling.causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation=kwargs["activation"]).transpose(1, 2)


UNDEFINED = ("empty", "empty_like", "new_empty")  # their bits mean nothing
TAKEN_OVER = {"gated_delta_rule": rule_of_eager, "causal_conv1d": convolution_of_eager}


def compare(call: Call, rounding: str) -> tuple[float, float]:
    """The fractions of outputs and gradients whose bits are not eager's."""
    eager = Call(call.name, TAKEN_OVER.get(call.name, call.function), call.leaves, call.spec)
    expected, expected_gradients = outcome(eager.run, call.leaves)
    run = call.run
    if call.name not in TAKEN_OVER:
        torch._dynamo.reset()
        run = torch.compile(call.run, backend="ple_gdn", fullgraph=True, options={"rounding": rounding})
    actual, gradients = outcome(run, call.leaves)
    return fraction(actual[: len(expected)], expected), fraction(gradients, expected_gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--length", type=int, default=72)
    parser.add_argument("--rounding", default="eager_all", choices=("eager_all", "eager", "fast"))
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    calls, rows, listed = record(args), [], set()
    for key, call in calls.items():
        if call.name in UNDEFINED:
            continue
        outputs, gradients = compare(call, args.rounding)
        if outputs or gradients:
            listed.add(key)
            rows.append((call.name, call.inputs, call.count, f"{outputs:.2%}", f"{gradients:.2%}"))
            print(*rows[-1], sep=" | ", flush=True)
    print(f"{len(calls)} kinds of calls, {len(rows)} of them not bitwise eager")
    eager, compiled = step(args), step(args, backend="ple_gdn", options={"rounding": args.rounding})
    for name, other in (("eager", eager), ("eager with the listed ops compiled", step_with_listed_ops(args, listed))):
        logits, gradients = [compiled[0]], list(compiled[1].values())
        parts = (fraction(logits, [other[0]]), fraction(gradients, list(other[1].values())))
        sizes = (logits[0].numel(), sum(g.numel() for g in gradients))
        print(f"compiled layers against {name}, differing: {parts[0]:.4%} of {sizes[0]} logits,", end=" ")
        print(f"{parts[1]:.4%} of {sizes[1]} gradients")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
