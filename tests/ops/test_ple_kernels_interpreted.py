"""The CUDA path of PLE in Triton's interpreter, on tiny shapes: launch plans and kernel arithmetic without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# In a process of its own: triton reads TRITON_INTERPRET when it is imported.
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from oracles.ple import ple_inputs, ple_packed
from ple_gdn.ops.ple import configs
from ple_gdn.ops.ple.backward import launch_backward
from ple_gdn.ops.ple.forward import launch_forward

torch.set_num_threads(1)
configs.MINIMUM_SPAN = 6  # several spans on a few rows
batch, tokens, streams, channels, kernel, dilation = map(int, sys.argv[2].split())
boundaries = [int(x) for x in sys.argv[3].split()] or None
residual = boundaries is None
dtype = getattr(torch, sys.argv[4])
inputs = ple_inputs(batch, tokens, streams, channels, kernel, dtypes=dtype, seed=2)
cu = None if boundaries is None else torch.tensor(boundaries)
mask = None if boundaries is None else torch.arange(tokens)[None] % 4 != 1
out, stats = launch_forward(*inputs, cu, mask, dilation, 1e-6, 64 << 20, residual)
dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
grads = launch_backward(dout, *inputs, cu, mask, stats, dilation, 1e-6, 64 << 20, None, residual)
leaves = [x.double().requires_grad_() for x in inputs]
want = ple_packed(leaves, boundaries, dilation=dilation, conv_mask=None if mask is None else mask.double())
want = want + leaves[0] if residual else want
for got, ref in zip((out, *grads), (want, *torch.autograd.grad(want, leaves, dout.double())), strict=True):
    error = (got.double() - ref).norm() / ref.norm().clamp_min(1e-30)
    assert error < (1e-5 if dtype == torch.float32 else 1e-3), (got.shape, error)
"""


@pytest.mark.parametrize(
    ("sizes", "boundaries", "dtype"),
    [
        ("1 12 4 8 2 1", "", "float32"),
        ("1 14 2 6 3 2", "0 3 3 4 13", "float32"),
        ("2 7 3 5 1 1", "", "float32"),
        ("1 10 2 16 4 3", "", "float16"),
    ],
    ids=["two_taps", "packed_masked", "odd_batch_rows", "half_pairs"],
)
def test_interpreted_kernels_match_float64(sizes: str, boundaries: str, dtype: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1]), sizes, boundaries, dtype]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


NEAR_ZERO = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from oracles.ple import ple_inputs, ple_packed
from ple_gdn.ops.ple.backward import launch_backward
from ple_gdn.ops.ple.forward import launch_forward

torch.set_num_threads(1)
inputs = ple_inputs(1, 8, 2, 256, 4, seed=3)
q, k = (x.double().view(8, 2, 256) for x in inputs[:2])
folded = k * (1 + inputs[3].double()).mul(1 + inputs[4].double()).view(2, 256)
part = (q * folded).sum(-1, keepdim=True) / folded.square().sum(-1, keepdim=True)
inputs[0] = (q - (1 - 1e-3) * part * folded).float().view(1, 8, 512)
dout = torch.randn(1, 8, 512, generator=torch.Generator().manual_seed(5))
_, stats = launch_forward(*inputs, None, None, 3, 1e-6, 64 << 20, False)
grads = launch_backward(dout, *inputs, None, None, stats, 3, 1e-6, 64 << 20, None, False)
leaves = [x.double().requires_grad_() for x in inputs]
want = torch.autograd.grad(ple_packed(leaves, None, dilation=3), leaves, dout.double())
for got, ref in zip(grads, want, strict=True):
    error = (got.double() - ref).norm() / ref.norm()
    assert error < 1e-6, (got.shape, error)
"""


def test_fp32_gradients_near_a_zero_score_keep_every_digit() -> None:
    """Scores of about 1e-3: an fp32 sum of the products is off by 1e-7 and puts 1e-4 and more into four gradients."""
    command = [sys.executable, "-c", NEAR_ZERO, str(Path(__file__).parents[1])]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
