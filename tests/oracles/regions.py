"""Checkpoint regions around a gated delta rule, as models: closed by the rule, or with savers behind it."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

import ple_gdn

H, HV, K, V, T = 1, 2, 16, 16, 70
W = HV * V
D = 2 * H * K + HV * V


class Gdn(torch.nn.Module):
    """A projection and the rule, [1, T, W] -> [1, T, W]."""

    def __init__(self, save_mode: str = "light", reuse: bool | str = "auto") -> None:
        super().__init__()
        self.options = {"save_mode": save_mode, "reuse_recompute_tapes": reuse}
        self.proj = torch.nn.Linear(W, D + 2 * HV, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, g, beta = self.proj(x).split([H * K, H * K, HV * V, HV, HV], -1)
        q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
        g = -torch.nn.functional.softplus(g.float())
        o, _ = ple_gdn.gated_delta_rule(q, k, v, g, beta.sigmoid(), use_qk_l2norm=True, **self.options)
        return o.flatten(-2)


class Layer(torch.nn.Module):
    """closing: the rule is the region's last saver. Else a projection and a SwiGLU save behind it."""

    def __init__(self, closing: bool, **kwargs) -> None:
        super().__init__()
        self.gdn, self.closing = Gdn(**kwargs), closing
        self.out = None if closing else torch.nn.Linear(W, 2 * W, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        o = self.gdn(x)
        if self.closing:
            return o
        gate, up = self.out(o).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


class Stack(torch.nn.Module):
    def __init__(self, closing: bool, layers: int = 1, checkpointed: bool = True, **kwargs) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(closing, **kwargs) for _ in range(layers))
        self.checkpointed = checkpointed
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(5)  # as initialised, the gradients of two layers are 1e-20

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def tokens() -> torch.Tensor:
    return torch.randn(1, T, W, generator=torch.Generator().manual_seed(1))


class SwigluRegion(torch.nn.Module):
    """A region of a rule on given q, k, v, g, beta, an output projection and a SwiGLU of `inner` units (0: none)."""

    def __init__(self, heads: int, value_heads: int, width: int, inner: int, **options) -> None:
        super().__init__()
        size, self.options = value_heads * width, options
        self.out = torch.nn.Linear(size, size, bias=False)
        self.up = torch.nn.Linear(size, 2 * inner, bias=False) if inner else None
        self.down = torch.nn.Linear(inner, size, bias=False) if inner else None

    def body(self, *inputs: torch.Tensor) -> torch.Tensor:
        o, _ = ple_gdn.gated_delta_rule(*inputs, use_qk_l2norm=True, **self.options)
        y = self.out(o.flatten(-2))
        if self.up is None:
            return y
        gate, up = self.up(y).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, *inputs, use_reentrant=False)
