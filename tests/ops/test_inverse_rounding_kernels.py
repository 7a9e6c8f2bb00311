"""The kernels that carry X's rounding errors: the plain one interpreted, the Hopper one as compiled PTX on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from oracles import operand_runs as operands
from oracles.carried import carried, gated_inverse, state_error
from oracles.ptx_machine import Machine, Memory

from ple_gdn.ops.gated_delta_rule import operands_hopper, rounding_hopper

WORKER = Path(__file__).with_name("inverse_rounding_worker.py")


def test_the_plain_kernel_carries_errors_where_keys_are_alike_and_only_there() -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("alike", "alike, own norm"):
        other, error, model = found[name]
        # Numbers near 0 end an ulp away, after fp32's own error.
        assert other < 0.3, name
        assert error < 0.65, name  # of the last row, mostly, which none below makes up for
        assert model == pytest.approx(1.0, abs=0.02), name
    assert found["not alike"][0] > 0.05  # the model carries, the kernel does not
    assert found["not alike"][1] == pytest.approx(1.0, abs=0.02)


def rounded(binary: object, x: dict, made: dict, H: int, items: int = rounding_hopper.MARKS) -> torch.Tensor:
    """X of every program, after the operand kernel's `made`."""
    memory, found = Memory(), made["x"].clone()
    tensors = (x["k"], x["beta"], made["gcum"], made["k_rstd"], made["table"], found, x["cu"], x["offsets"])
    chunks = len(made["table"])
    arguments = [memory.place(t) for t in tensors] + [len(operands.LENGTHS), len(x["q"]), 1, chunks, 0, 0]
    machine = Machine(binary.asm["ptx"], binary.metadata.shared, memory)
    for program in range(-(-chunks * H // items)):
        machine.run(program, arguments)
    return found


# (H, HV, marks a CTA, l2norm): one CTA for all; keys of norm .8 as they are; several CTAs, the last of which has chunks
# of no document; groups of two parts.
@pytest.mark.parametrize(
    ("H", "HV", "items", "l2norm"),
    [
        *((1, 3, 16, True), (1, 2, 16, False)),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((2, 2, 2, True), (2, 10, 16, True))),
    ],
)
def test_the_hopper_kernel_rounds_marked_chunks_and_no_other(H: int, HV: int, items: int, l2norm: bool) -> None:
    made_by = operands.compiled(operands_hopper, H, HV, l2norm=l2norm)
    binary = operands.compiled_rounding(H, HV, items=items)
    x = operands.draw(H, HV, "near equal keys")
    # Chunks of one head have keys of their own; so has the first chunk of another.
    x["g"], x["beta"] = -0.02 * torch.rand(x["g"].shape), 0.2 + torch.rand(x["beta"].shape)
    x["k"][:64, -1] = torch.randn(64, 128).bfloat16() if H > 1 else x["k"][:64, -1]
    if not l2norm:
        x["k"] = (0.8 * torch.nn.functional.normalize(x["k"].float(), dim=-1)).bfloat16()
    made = operands.run(made_by, x, H, HV)
    found = rounded(binary, x, made, H, items)
    carrying, errors, as_model, plain = 0, 0.0, 0.0, 0.0
    for start, end in ((s + i, min(s + i + 64, e)) for s, e in pairwise(x["cu"].tolist()) for i in range(0, e - s, 64)):
        for head in range(HV):
            own = head * H // HV
            k = x["k"][start:end, own].double()
            k = k * (k.square().sum(1, keepdim=True) + 1e-6).rsqrt() if l2norm else k
            gates = (x["g"][start:end, head], x["beta"][start:end, head])
            exact, tile = gated_inverse(k, *gates), found[start:end, head, : end - start].double()
            before = made["x"][start:end, head]
            if end - start == 1 or (own == 1 and start == 0):
                assert torch.equal(found[start:end, head], before)
                continue
            carrying += 1
            assert (found[start:end, head, end - start :] == 0).all()
            model = carried(exact, k, *gates, torch.bfloat16)
            errors += state_error(tile, exact, k, *gates)
            as_model += state_error(model, exact, k, *gates)
            plain += state_error(before[:, : end - start].double(), exact, k, *gates)
    assert carrying >= 2 * HV
    assert errors == pytest.approx(as_model, rel=0.02)
    assert errors < 0.6 * plain  # most of it of the last rows, which none below makes up for
    other = operands.draw(H, HV, "plain")
    other["k"] = other["k"] if l2norm else (other["k"].float() / 16).bfloat16()
    made = operands.run(made_by, other, H, HV)
    assert torch.equal(rounded(binary, other, made, H, items).nan_to_num(), made["x"].nan_to_num())


def test_two_programs_of_the_hopper_kernel_share_a_multiprocessor(tmp_path: Path) -> None:
    binary = operands.compiled_rounding(16, 48)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    assert int(re.search(r"STACK:(\d+)", usage)[1]) == 0
    assert binary.metadata.shared <= 233472 // 2 - 1024
