"""A user's saved-tensor hooks (save_on_cpu, byte counters) around compiled code."""

from __future__ import annotations

import torch

import ple_gdn


def _mix(up: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    weights = torch.sigmoid(up).unflatten(-1, (4, -1))
    return (weights * normed.unflatten(-1, (4, -1))).mean(-2)


def test_hooks_active_at_compile_time_see_real_tensors_only_and_passes_still_run():
    seen = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.data_ptr(), x.untyped_storage().nbytes()))  # data_ptr raises on a fake
        return x

    up, normed = (torch.randn(3, 5, 64, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = torch.compile(_mix, backend="ple_gdn", fullgraph=True)(up, normed)
    report = ple_gdn.last_report()
    assert [r.op for r in report.rewrites] == ["gated_residual_mix"]
    assert not report.failures
    assert seen
    grads = torch.autograd.grad(out.sum(), (up, normed))
    expected = torch.autograd.grad(_mix(up, normed).sum(), (up, normed))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want)
