"""Log-probability and gradient drift between eager and compiled BF16 code, by depth of a Qwen4-Exp text stack.

    python benchmarks/rounding_drift.py [--depths 1 2 4 8 16 32 48] [--train-steps 200] [--device cuda --hidden 2560] \
        [--csv drift.csv] [--plot drift.png]

A policy-gradient trainer compares log-probabilities of an eager rollout with those of a compiled actor. For each depth
the same weights run once in eager and once with every decoder layer compiled, on the same rows of real text, and the
script reports what the trainer would see: the log-probability difference, the 99.9 % tail of the importance ratio
exp(Δ log p), and the worst relative gradient difference of a parameter. All layers are linear attention; PLE sits in
the second. Weights are random, or trained in eager for `--train-steps` optimiser steps, once for all providers.

Every provider is a process of its own; the baselines never load `ple_gdn`. "eager_all, same rule" is compared with an
eager run that calls this package's gated delta rule and convolution instead of Hugging Face's, as a rollout can.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "examples" / "data" / "founding_documents.txt"
PROVIDERS: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "emulate_precision_casts": {"backend": "inductor", "options": {"emulate_precision_casts": True}},
    "ple_gdn eager": {"backend": "ple_gdn"},
    "ple_gdn eager_all": {"backend": "ple_gdn", "options": {"rounding": "eager_all"}},
    "eager_all, same rule": {"backend": "ple_gdn", "options": {"rounding": "eager_all"}},
}
# Compared not with eager as it is, but with eager calling this package's gated delta rule and convolution.
SAME_RULE = "eager_all, same rule"
MEASURES = ("logits differing", "logp max", "logp mean", "ratio 99.9 %", "worst gradient", "gradients differing")


def rows_of_text(count: int, length: int, seed: int):
    import torch

    data = torch.tensor(list(TEXT.read_bytes()), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(data) - length, (count,), generator=generator)
    return torch.stack([data[s : s + length] for s in starts.tolist()])


def build(depth: int, hidden: int, device: str):
    """A random FP32 stack of `depth` layers."""
    sys.path.insert(0, str(ROOT / "tests"))
    from hf import tiny

    settings = {"hidden_size": hidden, "ple_embed_dim": hidden, "vocab_size": 264, "num_hidden_layers": depth}
    settings |= {"eos_token_id": 256, "bos_token_id": 256, "pad_token_id": 256}
    settings |= {"layer_types": [tiny.LINEAR] * depth, "ple_layer_ids": [2] if depth > 1 else []}
    return tiny.build("qwen4_exp", **settings).to(device)


def log_probs(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits, logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def train(args: argparse.Namespace, depth: int) -> dict[str, float]:
    """Trains the stack in eager and leaves its weights for the providers; the loss before and after."""
    import torch

    torch.set_num_threads(args.threads)
    model, losses = build(depth, args.hidden, args.device), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.train_steps):
        optimizer.zero_grad()
        loss = -log_probs(model, rows_of_text(8, args.length, step + 1).to(args.device))[1].mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save(model.state_dict(), weights_of(args, depth))
    return {"first loss": losses[0], "last loss": sum(losses[-10:]) / len(losses[-10:])}


def weights_of(args: argparse.Namespace, depth: int) -> Path:
    return Path(args.weights) / f"depth{depth}.pt"


def evaluate(model, ids) -> tuple:
    """Logits, log-probabilities and gradients of one step of -mean(log p)."""
    model.zero_grad(set_to_none=True)
    logits, logp = log_probs(model, ids)
    (-logp.mean()).backward()
    grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach().float(), logp.detach(), grads


def drift(provider: str, args: argparse.Namespace, depth: int) -> dict[str, float | str]:
    import torch

    torch.set_num_threads(args.threads)
    model = build(depth, args.hidden, args.device)
    if args.train_steps:
        model.load_state_dict(torch.load(weights_of(args, depth), map_location=args.device))
    model = model.bfloat16()
    ids = rows_of_text(args.batch, args.length, 0).to(args.device)
    if provider == SAME_RULE:
        import ple_gdn.backend  # noqa: F401  (takes the functions over when Dynamo meets them)

        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="eager")
    logits, logp, grads = evaluate(model, ids)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, **PROVIDERS[provider])
    compiled_logits, compiled_logp, compiled_grads = evaluate(model, ids)
    assert ("ple_gdn" in sys.modules) == (PROVIDERS[provider]["backend"] == "ple_gdn"), (
        "the baseline process loaded ple_gdn"
    )
    difference = compiled_logp - logp
    worst = max((((compiled_grads[n] - g).norm() / g.norm().clamp_min(1e-30)).item(), n) for n, g in grads.items())
    differing = sum((compiled_grads[n] != g).sum().item() for n, g in grads.items())
    return {
        "logits differing": (compiled_logits != logits).float().mean().item(),
        "logp max": difference.abs().max().item(),
        "logp mean": difference.abs().mean().item(),
        "ratio 99.9 %": difference.abs().flatten().quantile(0.999).exp().item(),
        "worst gradient": worst[0],
        "gradients differing": differing / sum(g.numel() for g in grads.values()),
        "worst name": worst[1],
    }


def plot(path: str, table: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, measure in zip(axes, ("logp max", "worst gradient"), strict=True):
        for provider in dict.fromkeys(row["provider"] for row in table):
            points = [(row["depth"], max(row[measure], 1e-8)) for row in table if row["provider"] == provider]
            axis.plot(*zip(*points, strict=True), marker="o", label=provider)
        axis.set(xlabel="layers", ylabel=f"{measure}, compiled against eager", xscale="log", yscale="log")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def rows_of_worker(worker: str, weights: str) -> Iterator[dict[str, Any]]:
    """What one worker process, started with this one's arguments, reports depth by depth."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", worker, "--weights", weights]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"worker {worker} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 48])
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=list(PROVIDERS))
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv")
    parser.add_argument("--plot")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        for depth in args.depths:
            found = train(args, depth) if args.worker == "train" else drift(args.worker, args, depth)
            print(json.dumps({"provider": args.worker, "depth": depth, **found}), flush=True)
        return
    table = []
    with tempfile.TemporaryDirectory() as weights:
        if args.train_steps:
            for row in rows_of_worker("train", weights):
                print(
                    f"trained {row['depth']:>3} layers: loss {row['first loss']:.2f} to {row['last loss']:.2f}",
                    flush=True,
                )
        print(f"{'provider':>24} {'depth':>5}", *(f"{m:>19}" for m in MEASURES), "worst parameter")
        for provider in args.providers:
            for row in rows_of_worker(provider, weights):
                table.append(row)
                cells = (f"{row[m]:>19.3g}" for m in MEASURES)
                print(f"{provider:>24} {row['depth']:>5}", *cells, row["worst name"], flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, ["provider", "depth", *MEASURES, "worst name"])
            writer.writeheader()
            writer.writerows(table)
    if args.plot:
        plot(args.plot, table)


if __name__ == "__main__":
    main()
