"""One Qwen4-Exp decoder layer at real sizes (PLE, gated residuals, delta rule, SwiGLU): a training step by provider.

    python benchmarks/bench_decoder_layer.py [--tokens 4096 32768] [--limit 150] [--out results.json]
    python benchmarks/bench_decoder_layer.py --device cpu --hidden 64 --tokens 128 --repeats 2    # does it run?

Hidden 2560, 4 streams, 16 query/key and 48 value heads of 128, PLE, and a SwiGLU of width 2048 in place of the experts;
bf16, forward and backward. Providers, each a process of its own: Hugging Face's eager code; plain Inductor; the rule of
FlashQLA (or FLA) with Inductor for the rest; this backend. A provider that is not ready (compiled and warm) in --limit
seconds is reported as such: Hugging Face's chunk loop unrolls, 512 iterations at 32,768 tokens. Up to 8,192 tokens all
providers are resident and timed in turn; beyond, one after the other, since eager alone may need most of the memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import time_once  # (beside this script)
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

PROVIDERS = ("eager", "inductor", "peer rule + inductor", "ple_gdn")
RESIDENT = 8192


def config(hidden: int) -> Qwen4ExpTextConfig:
    real = hidden == 2560
    return Qwen4ExpTextConfig(
        vocab_size=1024,
        hidden_size=hidden,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        num_attention_heads=16 if real else 4,
        num_key_value_heads=2,
        head_dim=256 if real else 16,
        linear_num_key_heads=16 if real else 2,
        linear_num_value_heads=48 if real else 6,
        linear_key_head_dim=128 if real else 16,
        linear_value_head_dim=128 if real else 16,
        hc_count=4,
        hc_lowrank=320 if real else 16,
        ple_layer_ids=[1],
        ple_embed_dim=hidden,
        ngram_vocab_size_base=20_011,  # the lookup is no part of the comparison: a small table
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )


def layer_step(provider: str, hidden: int, tokens: int, device: str) -> Callable[[], None]:
    """A training step of the one layer, on the arguments that the text model passes to it."""
    torch.manual_seed(0)
    settings = config(hidden)
    model = modeling.Qwen4ExpTextModel(settings).to(device, torch.bfloat16)
    layer = model.layers[0]
    width = 2048 if hidden == 2560 else 2 * hidden
    layer.mlp = modeling.Qwen4ExpTextMLP(settings, intermediate_size=width).to(device, torch.bfloat16)
    caught: dict[str, Any] = {}

    def catch(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.update(args=args, kwargs=kwargs)
        raise StopIteration

    handle = layer.register_forward_pre_hook(catch, with_kwargs=True)
    ids = torch.randint(1, 1024, (1, tokens), device=device)
    try:
        model(input_ids=ids, use_cache=False)
    except StopIteration:
        handle.remove()
    x = torch.randn_like(caught["args"][0]).requires_grad_()
    upstream = torch.randn_like(x)
    if provider == "peer rule + inductor":
        modeling.torch_chunk_gated_delta_rule = peer_rule()
    if provider != "eager":
        # The peers' functions are compile-disabled, so a graph break is theirs to have.
        backend = "ple_gdn" if provider == "ple_gdn" else "inductor"
        layer.compile(backend=backend, fullgraph=provider != "peer rule + inductor")
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def step() -> None:
        torch.autograd.grad(layer(x, *caught["args"][1:], **caught["kwargs"]), wanted, upstream, allow_unused=True)

    return step


def peer_rule() -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    if importlib.util.find_spec("flash_qla"):
        from flash_qla import chunk_gated_delta_rule as peer
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as peer
    peer = torch.compiler.disable(peer)

    def rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> tuple[torch.Tensor, Any]:
        normalise = given.get("use_qk_l2norm_in_kernel", False)
        return peer(query, key, value, given["g"], given["beta"], use_qk_l2norm_in_kernel=normalise)

    return rule


def worker(provider: str, args: argparse.Namespace) -> None:
    """Answers one line with how the start went, then every line on its input with the milliseconds of a step."""
    tokens, cuda = args.tokens[0], args.device == "cuda"
    step = layer_step(provider, args.hidden, tokens, args.device)
    began = time.perf_counter()
    step()
    report: dict[str, Any] = {"first_s": round(time.perf_counter() - began, 1)}
    step()
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        report["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    assert ("ple_gdn" in sys.modules) == (provider == "ple_gdn"), "a baseline process loaded ple_gdn"
    print("ready", json.dumps(report), flush=True)
    flush = torch.empty(256 << 20 if cuda else 1, dtype=torch.uint8, device=args.device)
    for _ in sys.stdin:
        began = time.perf_counter()
        milliseconds = time_once(step, flush) if cuda else step() or 1e3 * (time.perf_counter() - began)
        print(f"ms {milliseconds:.4f}", flush=True)


class Worker:
    def __init__(self, provider: str, tokens: int, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", provider, "--tokens", str(tokens)]
        command += ["--device", args.device, "--hidden", str(args.hidden)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.times: list[float] = []
        self.report: dict[str, Any] = {}

    def answer(self, word: str, seconds: float) -> str | None:
        """The rest of the first line that begins with `word`; None if it does not come in time."""
        end = time.monotonic() + seconds
        while select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            line = self.process.stdout.readline()
            if not line:
                break
            if line.startswith(word):
                return line[len(word) :].strip()
        return None

    def start(self, limit: float) -> bool:
        line = self.answer("ready", limit)
        ended = self.process.poll()
        reason = f"exit status {ended}" if ended else f"not ready in {limit:.0f} s"
        self.report = json.loads(line) if line else {"failed": reason}
        return line is not None

    def time(self) -> None:
        self.process.stdin.write("go\n")
        self.times.append(float(self.answer("ms", 120)))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(tokens: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    groups = [args.providers] if tokens <= RESIDENT else [[p] for p in args.providers]
    rows = []
    for group in groups:
        workers = {provider: Worker(provider, tokens, args) for provider in group}
        ready = [w for w in workers.values() if w.start(args.limit)]
        for _ in range(args.repeats):
            for one in ready:
                one.time()
        for provider, one in workers.items():
            one.stop()
            row = {"tokens": tokens, "provider": provider, **one.report}
            rows.append(row | ({"ms": round(statistics.median(one.times), 3)} if one.times else {}))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit", type=float, default=150, help="seconds until a provider must be warm")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=PROVIDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args)
        return
    rows = [row for tokens in args.tokens for row in measure(tokens, args)]
    if args.out:
        gpu = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
        args.out.write_text(json.dumps({"torch": torch.__version__, "device": gpu, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
