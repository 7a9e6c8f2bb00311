"""The CUDA launchers of the gated residual in Triton's interpreter: grids, tails and arithmetic without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# In a process of its own: triton reads TRITON_INTERPRET when it is imported. The interpreter has no libdevice.
SCRIPT = """
import torch
import triton.language as tl
from ple_gdn.ops.gated_residual import kernels, launch, reference

torch.set_num_threads(1)
kernels.libdevice.exp = lambda x: tl.exp(x)  # looked up when called: the interpreter replaces it while it runs
launch.BLOCK = 16  # several blocks, the last one masked
generator = torch.Generator().manual_seed(0)
FP32, FP16 = torch.float32, torch.float16


def make(rows, last, dtype):
    # Every second column of a wider tensor, as a caller may hand it in.
    return torch.randn(2, rows, 2 * last, generator=generator).to(dtype)[..., ::2]


def check(bar, name, *args):
    got, want = (getattr(module, name)(*args) for module in (launch, reference))
    for ours, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.is_contiguous(), name
        if ours.numel():
            error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert error < bar, (name, float(error))


for first, second, rows, streams, width in (
    (FP32, FP32, 3, 4, 37), (FP16, FP16, 2, 3, 16), (FP16, FP32, 2, 5, 19), (FP32, FP32, 0, 2, 8)
):
    total, wide = streams * width, torch.promote_types(first, second)
    bar = 1e-6 if first == FP32 else 1e-3
    check(bar, "down", make(rows, total, first), streams)
    check(bar, "down_backward", make(rows, total, first), make(rows, total, first), streams)
    check(bar, "mix", make(rows, total, first), make(rows, total, second), streams)
    dy = make(rows, width, wide)
    check(bar, "mix_backward", dy, make(rows, total, first), make(rows, total, second), streams)
    check(bar, "inject", make(rows, width, first), make(rows, total, wide), make(rows, streams, second))
    check(bar, "inject_backward", make(rows, total, wide), make(rows, width, first), make(rows, streams, second))
"""


def test_interpreted_launchers_match_the_reference() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
