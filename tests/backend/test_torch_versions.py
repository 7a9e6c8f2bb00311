"""What differs between torch releases reads the same on every one of them."""

from __future__ import annotations

import torch

from ple_gdn.ops.torch_versions import is_exporting


def test_only_an_export_is_an_export():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x.sin() if is_exporting() else x.cos()

    x = torch.ones(3)
    torch.testing.assert_close(Model()(x), x.cos())
    torch.testing.assert_close(torch.compile(Model(), backend="eager", fullgraph=True)(x), x.cos())
    for strict in (False, True):
        torch.testing.assert_close(torch.export.export(Model(), (x,), strict=strict).module()(x), x.sin())
    torch.testing.assert_close(torch.compile(Model(), backend="eager", fullgraph=True)(x), x.cos())
