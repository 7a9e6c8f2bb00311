"""A layer of every op of ours, small, as the training tests use it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ple_gdn

STREAMS, CHANNELS, HEADS, WIDTH = 2, 32, 2, 16


class Layer(nn.Module):
    """Gated residual around a short convolution and the gated delta rule, then the PLE block; streams in and out."""

    def __init__(self) -> None:
        super().__init__()
        total = STREAMS * CHANNELS
        self.norm = nn.Parameter(torch.zeros(total))
        self.up = nn.Linear(8, total, bias=False)
        self.down = nn.Linear(total, 8, bias=False)
        self.write = nn.Linear(total, STREAMS, bias=False)
        self.qkv = nn.Linear(CHANNELS, 3 * HEADS * WIDTH, bias=False)
        self.gates = nn.Linear(CHANNELS, 2 * HEADS, bias=False)
        self.conv = nn.Parameter(0.5 * torch.randn(3 * HEADS * WIDTH, 4))
        self.out = nn.Linear(HEADS * WIDTH, CHANNELS, bias=False)
        self.key = nn.Linear(CHANNELS, total, bias=False)
        self.value = nn.Linear(CHANNELS, CHANNELS, bias=False)
        self.ple_norms = nn.ParameterList([nn.Parameter(torch.zeros(total)) for _ in range(3)])
        self.ple_conv = nn.Parameter(0.3 * torch.randn(total, 1, 4))

    def forward(self, streams: Tensor) -> Tensor:
        normed = ple_gdn.grouped_rms_norm(streams, self.norm, group_size=CHANNELS)
        up = self.up(ple_gdn.gated_residual_down(self.down(normed), STREAMS))
        hidden = ple_gdn.gated_residual_mix(up, normed, STREAMS)
        qkv = ple_gdn.causal_conv1d(self.qkv(hidden), self.conv, activation="silu")
        q, k, v = qkv.unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        g, beta = self.gates(hidden).float().chunk(2, -1)
        g = nn.functional.logsigmoid(g)
        o, _ = ple_gdn.gated_delta_rule(q, k, v, g, torch.sigmoid(beta), use_qk_l2norm=True)
        block = self.out(o.flatten(-2))
        streams = ple_gdn.gated_residual_inject(block, streams, torch.sigmoid(self.write(normed)).to(block.dtype))
        key, value = self.key(block), self.value(block)
        norms = [self.ple_norms[i] for i in range(3)]  # Dynamo of torch 2.11 cannot unpack a ParameterList
        return streams + ple_gdn.ple_gate_conv(streams, key, value, *norms, self.ple_conv, dilation=3)


def batch(rows: int = 2, tokens: int = 20, seed: int = 0) -> Tensor:
    return torch.randn(rows, tokens, STREAMS * CHANNELS, generator=torch.Generator().manual_seed(seed))


def layers(count: int = 2) -> nn.Sequential:
    """The same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(count)))
