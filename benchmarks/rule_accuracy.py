"""The gated delta rule of a trained BF16 stack, eager's and this package's, against float64: where a drift comes from.

    python benchmarks/rule_accuracy.py [--depth 16] [--train-steps 300]

Trains the stack of rounding_drift.py, runs it once in eager and keeps what the rule of every layer got: inputs, gates,
and the gradient of its output. On these values Hugging Face's function and `ple_gdn.gated_delta_rule` are compared with
the float64 rule: BF16 outputs that are not the rounded exact value, relative error of dg, and of dg summed over the
tokens, which is what reaches `in_proj_a`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import rounding_drift  # (beside this script)
import torch
from float64_qwen4 import float64_modeling
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

import ple_gdn

Rule = Callable[..., Tensor]


def upstream(function: Callable[..., Any]) -> Rule:
    return lambda q, k, v, g, beta: function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return ple_gdn.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True)[0]


def recorded(args: argparse.Namespace) -> list[tuple[list[Tensor], Tensor]]:
    """Inputs (q, k, v, g, beta) and the gradient of the output, of each layer's rule."""
    rounding_drift.train(args, args.depth)
    model = rounding_drift.build(args.depth, args.hidden, "cpu")
    model.load_state_dict(torch.load(rounding_drift.weights_of(args, args.depth)))
    model, original, calls = model.bfloat16(), modeling.torch_chunk_gated_delta_rule, []

    def keep(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        inputs = [x.detach() for x in (*args[:3], kwargs["g"], kwargs["beta"])]
        entry: list[Any] = [inputs, None]
        result[0].register_hook(lambda gradient: entry.__setitem__(1, gradient.detach()))
        calls.append(entry)
        return result

    modeling.torch_chunk_gated_delta_rule = keep
    try:
        logp = rounding_drift.log_probs(model, rounding_drift.rows_of_text(args.batch, args.length, 0))[1]
        (-logp.mean()).backward()
    finally:
        modeling.torch_chunk_gated_delta_rule = original
    return [(inputs, gradient) for inputs, gradient in calls]


def run(rule: Rule, inputs: list[Tensor], do: Tensor) -> tuple[Tensor, Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    o = rule(*leaves)
    return o.detach(), torch.autograd.grad(o, leaves, do.to(o.dtype))[3]


def error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--train-steps", type=int, default=300)
    args = parser.parse_args()
    settings = {"hidden": 64, "batch": 2, "length": 64, "device": "cpu", "threads": 1}
    torch.set_num_threads(1)
    exact_rule = upstream(float64_modeling().torch_chunk_gated_delta_rule)
    with tempfile.TemporaryDirectory() as weights:
        calls = recorded(argparse.Namespace(**vars(args), **settings, weights=weights))
    for layer, (inputs, do) in enumerate(calls):
        o, dg = run(exact_rule, [x.double() for x in inputs], do)
        print(f"layer {layer}: g {inputs[3].min():.1f} to {inputs[3].max():.1f}, |dg| {dg.norm():.1e}")
        for name, rule in (("eager", upstream(modeling.torch_chunk_gated_delta_rule)), ("ple_gdn", ours)):
            its_o, its_dg = run(rule, inputs, do)
            flips = (its_o != o.to(its_o.dtype)).sum().item()
            print(f"  {name:8s} {flips} of {o.numel()} outputs not the nearest, dg {error(its_dg, dg):.1e}", end="")
            print(f", over tokens {error(its_dg.sum(1), dg.sum(1)):.1e}", flush=True)


if __name__ == "__main__":
    main()
