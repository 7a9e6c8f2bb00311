"""Trains a small Hugging Face Qwen4-Exp text model with every pack of documents cut over ranks, and checks the losses.

    torchrun --nproc-per-node 2 examples/train_qwen4_cp.py                 # two context ranks
    torchrun --nproc-per-node 4 examples/train_qwen4_cp.py --context 2     # 2 x 2: FSDP2 on the other axis

Gloo on the CPU, NCCL where every process has a GPU. Each step, every data replica takes one pack of documents; its
context ranks hold a shard each. Only three things of the model look beyond a token: the gated delta rule (states are
exchanged), its short convolution (3 rows of history) and the PLE block (9 rows, and two token ids for its n-grams: all
ranks know the ids). They are called with `cp=`; the rest of the model is untouched and runs on the shard. Parameters
are sharded over the data axis by `fully_shard`; their gradients are summed over the context axis.

The first process then trains the same model alone, in plain eager PyTorch without this library, one document at a
time, and compares the losses.
"""

from __future__ import annotations

import argparse
import copy
import os
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_qwen4_tiny import EOS, TEXT, tiny_config
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpForCausalLM,
    Qwen4ExpTextGatedDeltaNet,
    Qwen4ExpTextPLELayer,
)

import ple_gdn

IGNORED = -100


class Pack:
    """Documents of random lengths in one row, each closed by EOS; a document's last token predicts nothing."""

    def __init__(self, seed: int, tokens: int, documents: int) -> None:
        data = torch.tensor(list(TEXT.read_bytes()), dtype=torch.long)
        generator = torch.Generator().manual_seed(seed)
        cuts = (torch.randperm(tokens // 2 - 1, generator=generator)[: documents - 1] * 2 + 2).sort().values.tolist()
        self.cu_seqlens = [0, *cuts, tokens]
        start = int(torch.randint(0, len(data) - tokens, (1,), generator=generator))
        self.ids = data[start : start + tokens].clone()[None]
        self.ids[0, [end - 1 for end in self.cu_seqlens[1:]]] = EOS
        self.labels = self.ids.roll(-1, 1)
        self.labels[0, [end - 1 for end in self.cu_seqlens[1:]]] = IGNORED

    @property
    def predictions(self) -> int:
        return int((self.labels != IGNORED).sum())


class Shard:
    """Where the patched modules find the context of the pack being trained on."""

    context: ple_gdn.KcpContext


def over_ranks(model: nn.Module, shard: Shard) -> None:
    """Gives the three modules that mix tokens forwards that know the shard; parameters and everything else stay."""

    def gated_delta_net(self: Qwen4ExpTextGatedDeltaNet, hidden_states, cache=None, attention_mask=None, **kwargs):
        mixed = self.in_proj_qkv(hidden_states)
        mixed = ple_gdn.causal_conv1d(
            mixed, self.conv1d.weight.squeeze(1), activation=self.activation, cp=shard.context
        )
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        g = -self.A_log.float().exp() * nn.functional.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        out, _ = ple_gdn.gated_delta_rule(
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            g,
            self.in_proj_b(hidden_states).sigmoid(),
            use_qk_l2norm=True,
            cp=shard.context,
        )
        gate = self.in_proj_z(hidden_states).unflatten(-1, (-1, self.head_v_dim))
        return self.out_proj(self.norm(out, gate).flatten(-2))

    def ple_layer(self: Qwen4ExpTextPLELayer, hidden_states, input_ids, cache=None, conv_mask=None):
        embeddings = self.ple_embedding(input_ids, cache)
        return ple_gdn.ple_gate_conv(
            *(hidden_states, self.key_proj(embeddings), self.value_proj(embeddings)),
            *(self.norm_key.weight, self.norm_query.weight, self.norm_conv.weight, self.conv1d.weight),
            dilation=self.conv1d.dilation[0],
            eps=self.norm_key.eps,
            cp=shard.context,
        )

    def shard_ids(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """N-gram ids are made for the whole pack, where each token's predecessors are at hand, and looked up here."""
        return (ple_gdn.kcp_scatter(args[0], shard.context),)

    for module in model.modules():
        if isinstance(module, Qwen4ExpTextGatedDeltaNet):
            module.forward = gated_delta_net.__get__(module)
        elif isinstance(module, Qwen4ExpTextPLELayer):
            module.forward = ple_layer.__get__(module)
            module.ple_embedding.ngram_embedding.register_forward_pre_hook(shard_ids)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def train_over_ranks(model: nn.Module, packs: list[list[Pack]], mesh: DeviceMesh, args: argparse.Namespace):
    """Losses per step; `packs[step][replica]`."""
    replica, rank, group = mesh.get_local_rank("data"), mesh.get_local_rank("context"), mesh.get_group("context")
    replicas, ranks = mesh["data"].size(), mesh["context"].size()
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    config, shard = model.config, Shard()
    model.to(device)
    over_ranks(model, shard)
    for layer in model.model.layers:
        if args.compile:
            layer.compile(backend="ple_gdn")
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    losses = []
    for step in packs:
        pack, count = step[replica], sum(p.predictions for p in step)
        part = ple_gdn.kcp_partition(pack.cu_seqlens, ranks, args.layout)
        shard.context = ple_gdn.build_kcp_context(part, group, rank, device, exchange=args.exchange)
        shard.context.prepare(config.linear_num_key_heads, config.linear_num_value_heads)
        ids = pack.ids.to(device)
        mine = ple_gdn.kcp_scatter(ids, shard.context)
        logits = model(input_ids=mine, ple_input_ids=ids, use_cache=False).logits
        loss = summed_loss(logits, ple_gdn.kcp_scatter(pack.labels.to(device), shard.context)) / count
        (replicas * loss).backward()  # fully_shard takes the mean over the data axis, we want the sum
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.to_local(), group=group)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def train_alone(model: nn.Module, packs: list[list[Pack]], learning_rate: float) -> list[float]:
    """The same steps in one process and plain eager, document by document."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for step in packs:
        count, total = sum(p.predictions for p in step), 0.0
        for pack in step:
            for start, end in pairwise(pack.cu_seqlens):
                logits = model(input_ids=pack.ids[:, start:end], use_cache=False).logits
                loss = summed_loss(logits, pack.labels[:, start:end]) / count
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, help="context ranks; default: all processes")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a pack")
    parser.add_argument("--documents", type=int, default=3, help="of a pack")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--layout", default="zigzag", choices=["contiguous", "zigzag", "zigzag_per_document"], help="of kcp_partition"
    )
    parser.add_argument("--exchange", default="ring", choices=["ring", "all_to_all"])
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--compile", action="store_true", help="compile each decoder layer with this backend")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world = dist.get_world_size()
    context = args.context or world
    shape = (world // context, context)
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", shape, mesh_dim_names=("data", "context"))
    torch.manual_seed(0)
    config = tiny_config()
    config.num_hidden_layers, config.layer_types = args.layers, config.layer_types[: args.layers]
    model = Qwen4ExpForCausalLM(config)
    alone = copy.deepcopy(model)
    seeds = accumulate([1] * args.steps * shape[0])
    packs = [[Pack(next(seeds), args.tokens, args.documents) for _ in range(shape[0])] for _ in range(args.steps)]
    losses = train_over_ranks(model, packs, mesh, args)
    if dist.get_rank() == 0:
        reference = train_alone(alone, packs, args.learning_rate)
        print(f"{shape[0]} data x {shape[1]} context ranks, {mesh.device_type}, {args.layout}, {args.exchange}")
        print("step   one process       ranks    difference")
        for step, (a, b) in enumerate(zip(reference, losses, strict=True)):
            print(f"{step:4d}    {a:10.6f}  {b:10.6f}    {b - a:+.1e}")
        worst = max(abs(a - b) / a for a, b in zip(reference, losses, strict=True))
        print(f"worst relative difference {worst:.1e}")
        assert worst < 1e-4, "the ranks do not train like one process"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
