"""The example's training run: gradients at every step against eager at equal weights, and free-running loss curves.

    python benchmarks/bench_training_parity.py [--steps 30] [--dtype float32]

At each step of the eager run the compiled model gets the eager run's weights and its expert choices (a routing flip is
no rounding), and every parameter's gradient is compared. The bar for fp32 is max(1e-4 |g|, 1e-7 |all gradients|).
Three yardsticks at the same points: eager's own gradient after half of the weights moved by one unit in the last place
("nudged"), plain Inductor's gradient, and the distance of eager and of the compiled model from the model in float64.
Then the losses of free runs: eager, this backend, and plain Inductor in a process that never loads `ple_gdn`. Writes
results/training_parity_<dtype>.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

PARTS = ("parity ple_gdn", "parity inductor", "free eager", "free ple_gdn", "free inductor")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import train_qwen4_tiny as example  # noqa: E402  (found through the line above)
from float64_qwen4 import float64_modeling  # noqa: E402  (beside this script)
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf  # noqa: E402


class FixedRouting:
    """Makes every router of a model repeat the choices it made in the recording pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.routers = [m for m in model.modules() if type(m).__name__ == hf.Qwen4ExpTextTopKRouter.__name__]
        for router in self.routers:
            router.register_buffer("choice", None, persistent=False)
            router.forward = self._forward(router)

    @staticmethod
    def _forward(router: torch.nn.Module):
        def forward(hidden: torch.Tensor):
            logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
            probabilities = torch.nn.functional.softmax(logits, dtype=_at_least_fp32(logits), dim=-1)
            value = probabilities.gather(-1, router.choice)
            if router.norm_topk_prob:
                value = value / value.sum(dim=-1, keepdim=True)
            return logits, value.to(logits.dtype), router.choice

        return forward


def _at_least_fp32(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def choices(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    found, hooks = [], []
    for module in model.modules():
        if isinstance(module, hf.Qwen4ExpTextTopKRouter):
            hooks.append(module.register_forward_hook(lambda _m, _i, out: found.append(out[2].clone())))
    with torch.no_grad():
        example.token_log_probs(model, tokens)
    for hook in hooks:
        hook.remove()
    return found


def step_gradients(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = -example.token_log_probs(model, tokens).mean()
    loss.backward()
    return loss.item(), example.gradients(model)


def compile_layers(model: torch.nn.Module, backend: str) -> None:
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)


def parity(backend: str, steps: int, dtype: torch.dtype) -> dict:
    """Worst ratio of a gradient difference to the bar, over steps and parameters; the eager curve."""
    torch.manual_seed(0)
    data = example.batches(steps, 2, 256)
    model = example.Qwen4ExpForCausalLM(example.tiny_config()).to(dtype)
    fixed = {name: copy.deepcopy(model) for name in ("eager", "compiled", "nudged")}
    config = example.tiny_config()
    config._experts_implementation = "eager"  # the grouped product has no float64 kernel
    fixed["float64"] = float64_modeling().Qwen4ExpForCausalLM(config).double()
    routings = {name: FixedRouting(m) for name, m in fixed.items()}
    compile_layers(fixed["compiled"], backend)
    optimizer, losses, rows = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
    for tokens in data:
        chosen = choices(model, tokens)
        gradients = {}
        for name, twin in fixed.items():
            twin.load_state_dict(model.state_dict())
            if name == "nudged":
                _nudge(twin)
            for router, choice in zip(routings[name].routers, chosen, strict=True):
                router.choice = choice
            loss, gradients[name] = step_gradients(twin, tokens)
            if name == "eager":
                losses.append(loss)
        rows.append(_compare(gradients))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients["eager"].get(name)
        optimizer.step()
    assert ("ple_gdn" in sys.modules) == (backend == "ple_gdn"), "the baseline process loaded ple_gdn"
    return {"rows": rows, "losses": losses}


@torch.no_grad()
def _nudge(model: torch.nn.Module) -> None:
    """Moves about half of the weights by one unit in the last place, as any reordering of fp32 sums does to values."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        parameter.copy_(torch.where(up, torch.nextafter(parameter, torch.full_like(parameter, torch.inf)), parameter))


def _compare(gradients: dict[str, dict[str, torch.Tensor]]) -> dict:
    eager, exact = gradients["eager"], gradients["float64"]
    total = torch.sqrt(sum(g.double().square().sum() for g in eager.values())).item()

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return (one.double() - other.double()).norm().item()

    worst = {"ratio": 0.0, "parameter": "-"}
    for name, g in eager.items():
        norm = g.double().norm().item()
        bar = max(1e-4 * norm, 1e-7 * total)
        ratio = distance(gradients["compiled"][name], g) / bar
        if ratio > worst["ratio"]:
            worst = {
                "ratio": ratio,
                "parameter": name,
                "relative": ratio * bar / max(norm, 1e-30),
                "nudged_ratio": distance(gradients["nudged"][name], g) / bar,
                "eager_from_float64": distance(g, exact[name]) / bar,
                "compiled_from_float64": distance(gradients["compiled"][name], exact[name]) / bar,
            }
    for name in ("eager", "compiled", "nudged"):
        # The worst parameter of each, whichever it is: how far from float64, in units of the same bar.
        worst[f"worst_{name}_from_float64"] = max(
            distance(gradients[name][p], exact[p]) / max(1e-4 * g.double().norm().item(), 1e-7 * total)
            for p, g in eager.items()
        )
    return worst


def free_run(backend: str, steps: int, dtype: torch.dtype) -> dict:
    torch.manual_seed(0)
    model = example.Qwen4ExpForCausalLM(example.tiny_config()).to(dtype)
    if backend != "eager":
        compile_layers(model, backend)
    optimizer, losses, seconds = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
    for tokens in example.batches(steps, 2, 256):
        start = time.perf_counter()
        losses.append(step_gradients(model, tokens)[0])
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    assert ("ple_gdn" in sys.modules) == (backend == "ple_gdn"), "the baseline process loaded ple_gdn"
    return {"losses": losses, "first": seconds[0], "median": sorted(seconds)[len(seconds) // 2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    if args.part:
        kind, _, backend = args.part.partition(" ")
        run = {"parity": parity, "free": free_run}[kind](backend, args.steps, dtype)
        print(json.dumps(run))
        return
    results = {"torch": torch.__version__, "dtype": args.dtype, "steps": args.steps}
    for part in PARTS:
        command = [sys.executable, __file__, "--steps", str(args.steps), "--dtype", args.dtype, "--part", part]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[part] = json.loads(output.splitlines()[-1])
    eager = results["free eager"]["losses"]
    for name in ("free ple_gdn", "free inductor"):
        gaps = [abs(a - b) for a, b in zip(results[name]["losses"], eager, strict=True)]
        results[name]["worst_loss_gap"], results[name]["mean_loss_gap"] = max(gaps), sum(gaps) / len(gaps)
    path = ROOT / "benchmarks" / "results" / f"training_parity_{args.dtype}.json"
    path.write_text(json.dumps(results, indent=1))
    for name in ("ple_gdn", "inductor"):
        rows = results[f"parity {name}"]["rows"]
        worst, over = max(rows, key=lambda row: row["ratio"]), sum(row["ratio"] > 1 for row in rows)
        print(f"{name:9s} worst gradient difference {worst['ratio']:.2f} x the bar, {over} steps over it: {worst}")
        for kind in ("eager", "nudged", "compiled"):
            print(f"  {kind} from float64: {max(row[f'worst_{kind}_from_float64'] for row in rows):.2f} x the bar")
    for name in ("eager", "ple_gdn", "inductor"):
        r = results[f"free {name}"]
        gap = f"worst loss gap {r['worst_loss_gap']:.2e}, mean {r['mean_loss_gap']:.2e}" if name != "eager" else ""
        print(f"{name:9s} first step {r['first']:7.1f} s, median step {1e3 * r['median']:6.0f} ms  {gap}")


if __name__ == "__main__":
    main()
