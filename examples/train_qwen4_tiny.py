"""Trains a small random Hugging Face Qwen4-Exp text model twice, in eager and through `ple_gdn`, and compares.

    python examples/train_qwen4_tiny.py [--steps 30] [--dtype float32|bfloat16] [--whole-model] [--output FILE.png]

Text: the Declaration of Independence and the Constitution of the United States (public domain), one token per
byte, rows of fixed length. Both runs start from the same weights and see the same batches. Printed at the end: what
the backend rewrote, both loss curves, the worst per-parameter gradient difference and the log-probability difference
at identical weights, step times, and the bytes autograd keeps for the backward, per decoder layer. The same goes into
one PNG.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

TEXT = Path(__file__).parent / "data" / "founding_documents.txt"
EOS = 256  # one past the largest byte


def tiny_config() -> Qwen4ExpTextConfig:
    return Qwen4ExpTextConfig(
        vocab_size=264,
        hidden_size=256,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        hc_count=4,
        hc_lowrank=32,
        ple_layer_ids=[2],
        ple_embed_dim=256,
        ngram_vocab_size_base=2003,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=EOS,
        bos_token_id=EOS,
        pad_token_id=EOS,
        tie_word_embeddings=False,
        use_cache=False,
    )


def batches(steps: int, rows: int, length: int) -> list[torch.Tensor]:
    """`steps` batches [rows, length] of byte tokens, cut from the text at fixed pseudo-random places."""
    data = torch.tensor(list(TEXT.read_bytes()), dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(data) - length, (steps, rows), generator=generator)
    return [torch.stack([data[s : s + length] for s in row.tolist()]) for row in starts]


def token_log_probs(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of each next token, [rows, length - 1]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


class _Metered(nn.Module):
    """A decoder layer whose saved-for-backward bytes are counted, parameters and the layer's own inputs excluded."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.saved_bytes = layer, 0

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        skip = {p.untyped_storage().data_ptr() for p in self.layer.parameters()}
        skip.add(hidden.untyped_storage().data_ptr())
        seen: set[int] = set()

        def pack(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in skip and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.saved_bytes += storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return self.layer(hidden, *args, **kwargs)


@contextmanager
def metered(layers: nn.ModuleList):
    """Swaps each decoder layer for its metered form while the block runs."""
    originals = list(layers)
    meters = [_Metered(layer) for layer in originals]
    for i, meter in enumerate(meters):
        layers[i] = meter
    try:
        yield meters
    finally:
        for i, layer in enumerate(originals):
            layers[i] = layer


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    probes: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # step -> gradients
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # step -> weights before it
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def train(name: str, model: nn.Module, data: list[torch.Tensor], probe_steps: set[int], learning_rate: float) -> Run:
    run, optimizer = Run(), torch.optim.AdamW(model.parameters(), lr=learning_rate)
    with metered(model.model.layers) as meters:
        for step, tokens in enumerate(tqdm(data, desc=name)):
            if step in probe_steps:
                run.weights[step] = {k: v.detach().clone() for k, v in _plain_state(model).items()}
            start = time.perf_counter()
            log_probs = token_log_probs(model, tokens)
            loss = -log_probs.mean()
            loss.backward()
            if step in probe_steps:
                run.probes[step], run.log_probs[step] = gradients(model), log_probs.detach()
            optimizer.step()
            optimizer.zero_grad()
            run.seconds.append(time.perf_counter() - start)
            run.losses.append(loss.item())
            if step == 0:
                run.saved_bytes = [meter.saved_bytes for meter in meters]
    return run


def _plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """State dict under the names of the unmetered model."""
    return {k.replace(".layer.", "."): v for k, v in model.state_dict().items()}


def compare(model: nn.Module, eager: Run, data: list[torch.Tensor]) -> tuple[float, str, float]:
    """Gradients and log-probabilities of `model` at the eager run's weights: worst relative gradient difference, its
    parameter, and the worst log-probability difference."""
    worst, worst_name, worst_log_prob = 0.0, "-", 0.0
    for step, weights in eager.weights.items():
        model.load_state_dict(weights)
        model.zero_grad()
        log_probs = token_log_probs(model, data[step])
        (-log_probs.mean()).backward()
        reference = {k.replace(".layer.", "."): g for k, g in eager.probes[step].items()}
        mine = gradients(model)
        total = torch.sqrt(sum(g.double().square().sum() for g in reference.values()))
        for name, expected in reference.items():
            # A gradient far below the model's total is compared on the total's scale: its own digits are noise.
            scale = max(expected.double().norm(), 1e-3 * total)
            difference = ((mine[name] - expected).double().norm() / scale).item()
            if difference > worst:
                worst, worst_name = difference, f"{name} at step {step}"
        worst_log_prob = max(worst_log_prob, (log_probs - eager.log_probs[step]).abs().max().item())
    return worst, worst_name, worst_log_prob


def plot(path: Path, eager: Run, ours: Run) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    left.plot(eager.losses, label="eager", linewidth=3, alpha=0.5)
    left.plot(ours.losses, label="ple_gdn", linewidth=1.2)
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="training loss")
    left.legend()
    places = range(len(eager.saved_bytes))
    right.bar([x - 0.2 for x in places], [b / 2**20 for b in eager.saved_bytes], 0.4, label="eager")
    right.bar([x + 0.2 for x in places], [b / 2**20 for b in ours.saved_bytes], 0.4, label="ple_gdn")
    right.set(xlabel="decoder layer (PLE on layer 1)", ylabel="MiB kept for backward", title="saved activations")
    right.set_xticks(list(places))
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--whole-model", action="store_true", help="one graph for the model, not one per decoder layer")
    parser.add_argument("--output", type=Path, default=Path("train_qwen4_tiny.png"))
    return parser.parse_args()


def main() -> None:
    import ple_gdn  # here, so that a baseline process can use the rest of this file without loading it

    args = arguments()
    torch.manual_seed(0)
    data = batches(args.steps, args.rows, args.length)
    reference = Qwen4ExpForCausalLM(tiny_config()).to(getattr(torch, args.dtype))
    model = copy.deepcopy(reference)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.1f} M parameters, {args.dtype}, batch {args.rows}x{args.length}")

    probe_steps = {0, args.steps // 2, args.steps - 1}
    eager = train("eager  ", reference, data, probe_steps, args.learning_rate)
    if args.whole_model:
        model.compile(backend="ple_gdn", fullgraph=True)
    else:
        for layer in model.model.layers:
            layer.compile(backend="ple_gdn", fullgraph=True)
    ours = train("ple_gdn", model, data, set(), args.learning_rate)
    worst, worst_name, worst_log_prob = compare(model, eager, data)

    print("\nrewrites made while compiling:")
    print(ple_gdn.merge_reports(ple_gdn.compile_reports()))
    print("\nstep   eager loss   ple_gdn loss   difference")
    for step, (a, b) in enumerate(zip(eager.losses, ours.losses, strict=True)):
        print(f"{step:4d}   {a:10.6f}   {b:12.6f}   {b - a:+.2e}")
    print(f"\nworst per-parameter gradient difference at equal weights: {worst:.2e}  ({worst_name})")
    print(f"worst log-probability difference at equal weights:        {worst_log_prob:.2e}")
    print(f"step time: eager {1e3 * statistics.median(eager.seconds):.0f} ms, ", end="")
    print(f"ple_gdn {1e3 * statistics.median(ours.seconds):.0f} ms (first, with compile, {ours.seconds[0]:.1f} s)")
    total, mine = sum(eager.saved_bytes), sum(ours.saved_bytes)
    print(f"saved activations: eager {total / 2**20:.1f} MiB, ple_gdn {mine / 2**20:.1f} MiB ({mine / total:.0%})")
    plot(args.output, eager, ours)
    print(f"plot: {args.output.resolve()}")


if __name__ == "__main__":
    main()
