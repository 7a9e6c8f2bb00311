"""One Qwen4-Exp decoder layer at real sizes (PLE, gated residuals, delta rule, SwiGLU): a training step by provider.

    python benchmarks/bench_decoder_layer.py [--tokens 4096 32768] [--site /opt/peers] [--out results.json]
    python benchmarks/bench_decoder_layer.py --device cpu --tokens 128 --repeats 2    # small: does it run?

Hidden 2560, 4 streams, 16 query/key and 48 value heads of 128, PLE, and a SwiGLU of width 2048 in place of the experts;
bf16, forward and backward. Providers, each a process of its own: Hugging Face's eager code; plain Inductor; the rule of
FlashQLA (or FLA, where that is missing; `--site` is a folder of packages that this process alone sees) with Inductor
for the rest; this backend. All are started at once, and one that is not compiled and warm in --limit seconds, or fails,
is reported as such. Those of one length are then timed in turn. Beyond 8,192 tokens plain Inductor is left out (Hugging
Face's chunk loop unrolls, 512 iterations at 32,768 tokens), and eager comes last, alone, since it may need most of the
memory. `peak_mib` is what a step needs beyond `held_mib` (parameters and inputs).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import time_once  # (beside this script)
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from workers import OUT_OF_TIME, Worker, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_qwen4_tiny import tiny_config

PEER = "peer rule + inductor"
PROVIDERS = ("eager", "inductor", PEER, "ple_gdn")
RESIDENT = 8192
STEP_SECONDS = 30.0
LAYER = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "ple_layer_ids": [1]}
REAL = {
    "hidden_size": 2560,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "hc_lowrank": 320,
    "ple_embed_dim": 2560,
    "ngram_vocab_size_base": 20_011,  # the lookup is no part of the comparison: a small table
}


def layer_step(provider: str, tokens: int, device: str) -> Callable[[], None]:
    """A training step of the one layer, on the arguments that the text model passes to it."""
    torch.manual_seed(0)
    settings = Qwen4ExpTextConfig(**tiny_config().to_dict() | LAYER | (REAL if device == "cuda" else {}))
    model = modeling.Qwen4ExpTextModel(settings).to(device, torch.bfloat16)
    layer = model.layers[0]
    width = 2048 if device == "cuda" else 2 * settings.hidden_size
    layer.mlp = modeling.Qwen4ExpTextMLP(settings, intermediate_size=width).to(device, torch.bfloat16)
    caught: dict[str, Any] = {}

    def catch(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.update(args=args, kwargs=kwargs)
        raise StopIteration

    handle = layer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        model(input_ids=torch.randint(0, 256, (1, tokens), device=device), use_cache=False)
    except StopIteration:
        handle.remove()
    x = torch.randn_like(caught["args"][0]).requires_grad_()
    upstream = torch.randn_like(x)
    if provider == PEER:
        modeling.torch_chunk_gated_delta_rule = peer_rule()
    if provider != "eager":
        # The peers' functions are compile-disabled, so a graph break is theirs to have.
        backend = "ple_gdn" if provider == "ple_gdn" else "inductor"
        layer.compile(backend=backend, fullgraph=provider != PEER)
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


class Subject:
    """What a worker process times."""

    def __init__(self, provider: str, tokens: int, device: str) -> None:
        if device == "cpu":
            torch.set_num_threads(1)
        self.provider, self.cuda = provider, device == "cuda"
        self.step = layer_step(provider, tokens, device)
        self.flush = torch.empty(256 << 20 if self.cuda else 1, dtype=torch.uint8, device=device)

    def answer(self, what: str) -> dict[str, Any]:
        return self.start() if what == "start" else {"ms": self.milliseconds()}

    def start(self) -> dict[str, Any]:
        began = time.perf_counter()
        self.step()
        if self.cuda:
            torch.cuda.synchronize()
        report: dict[str, Any] = {"first_s": round(time.perf_counter() - began, 1)}
        self.step()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            report["peak_mib"] = round((torch.cuda.max_memory_allocated() - held) / 2**20, 1)
            report["held_mib"] = round(held / 2**20, 1)
        if self.provider == PEER:
            names = ("flash_qla", "fla.ops.gated_delta_rule")
            report["peer"] = next(name for name in names if name in sys.modules)
        loaded = "ple_gdn" in sys.modules
        assert loaded == (self.provider == "ple_gdn"), "a baseline process loaded ple_gdn"
        return report

    def milliseconds(self) -> float:
        if self.cuda:
            return time_once(self.step, self.flush)
        began = time.perf_counter()
        self.step()
        return 1e3 * (time.perf_counter() - began)


class Bench:
    """Workers and rows by length and provider; the report is written after every step."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.workers: dict[tuple[int, str], Worker] = {}
        self.rows: dict[tuple[int, str], dict[str, Any]] = {}

    def start(self, wanted: list[tuple[int, str]]) -> None:
        """Starts these at once and waits until each is warm, or has failed."""
        for tokens, provider in wanted:
            environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # seven processes compile at once
            if provider == PEER and self.args.site:
                environment["PYTHONPATH"] = os.pathsep.join([str(self.args.site), os.environ.get("PYTHONPATH", "")])
            log = (self.args.logs or self.folder) / f"layer_{tokens}_{provider.replace(' ', '_')}.log"
            command = [__file__, "--worker", provider, "--tokens", str(tokens), "--device", self.args.device]
            self.workers[tokens, provider] = Worker(command, log, environment)
            self.workers[tokens, provider].send(what="start")
        end = time.monotonic() + self.args.limit
        for key in wanted:
            found = self.workers[key].answer(max(1.0, end - time.monotonic()))
            if found.get("failed") == OUT_OF_TIME:
                found["failed"] = f"not warm in {self.args.limit:.0f} s"
            self.rows[key] = {"tokens": key[0], "provider": key[1], **found}
        self.write()

    def time(self, keys: list[tuple[int, str]]) -> None:
        times: dict[tuple[int, str], list[float]] = {key: [] for key in keys}
        end = time.monotonic() + STEP_SECONDS
        for count in range(self.args.repeats):
            if count and time.monotonic() > end:
                break
            for key in keys:
                if not self.workers[key].failed:
                    times[key] += [x for x in [self.workers[key].ask(STEP_SECONDS, what="step").get("ms")] if x]
        for key in keys:
            if times[key]:
                self.rows[key] |= {"ms": round(statistics.median(times[key]), 3), "repeats": len(times[key])}
            if self.workers[key].failed:
                self.rows[key]["failed"] = self.workers[key].failed
            self.workers[key].stop()
        self.write()

    def run(self) -> None:
        alone, together = [], []
        for tokens in self.args.tokens:
            for provider in self.args.providers:
                key = (tokens, provider)
                if tokens > RESIDENT and provider == "inductor":
                    why = f"not run: the chunk loop unrolls to {-(-tokens // 64)} iterations"
                    self.rows[key] = {"tokens": tokens, "provider": provider, "failed": why}
                else:
                    (alone if tokens > RESIDENT and provider == "eager" else together).append(key)
        self.start(together)
        for tokens in self.args.tokens:
            self.time([key for key in together if key[0] == tokens])
        for key in alone:
            self.start([key])
            self.time([key])

    def write(self) -> None:
        if self.args.out:
            device = torch.cuda.get_device_name() if self.args.device == "cuda" else platform.processor()
            record = {"torch": torch.__version__, "device": device, "rows": list(self.rows.values())}
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps(record, indent=1) + "\n")

    def table(self) -> str:
        columns = ("tokens", "provider", "ms", "peak_mib", "held_mib", "first_s")
        lines = [f"{columns[0]:>6s}  {columns[1]:20s}" + "".join(f"{c:>10s}" for c in columns[2:])]
        for (tokens, provider), row in sorted(self.rows.items(), key=lambda item: item[0][0]):
            cells = "".join(f"{row.get(c, '-')!s:>10s}" for c in columns[2:])
            lines.append(f"{tokens:6d}  {provider:20s}{cells}  {row.get('failed') or row.get('peer', '')}")
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--site", type=Path, help="folder with the peer's packages")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit", type=float, default=170, help="seconds until a provider must be warm")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for what the workers print")
    parser.add_argument("--worker", choices=PROVIDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(lambda: Subject(args.worker, args.tokens[0], args.device).answer)
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        try:
            bench.run()
        finally:
            for worker in bench.workers.values():
                worker.stop()
            print(bench.table(), flush=True)


if __name__ == "__main__":
    main()
