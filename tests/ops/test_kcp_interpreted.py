"""The CUDA path of context parallelism: its Triton kernels interpreted on the CPU, and compiled for sm_90."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

SHARED_LIMIT = 232448 // 2  # two CTAs on a multiprocessor


def test_interpreted_ranks_equal_one_process_and_ring_equals_all_to_all() -> None:
    worker = Path(__file__).with_name("kcp_interpreter_worker.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(worker)], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["maps"]["float32"] < 1e-5, found["maps"]
    assert found["maps"]["float16"] < 5e-5, found["maps"]
    for case in found["ranks"]:
        assert case["equal"]
        assert max(case["errors"].values()) < 1e-5, case


@pytest.mark.parametrize("pieces", [False, True])
def test_the_map_kernel_compiles_for_hopper_two_to_a_multiprocessor(pieces: bool, tmp_path: Path) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ple_gdn.ops.kcp.map_kernel import map_kernel

    constants = {"H": 16, "HV": 48, "K": 128, "BK": 128, "BN": 64, "DOT": "tf32x3", "STAGES": 2, "PIECES": pieces}
    kinds = {"k_ptr": "*bf16", "x_ptr": "*bf16", "rows_ptr": "*fp32", "map_ptr": "*fp32", "T": "i32"}
    names = map_kernel.arg_names
    signature = {n: "constexpr" if n in constants else kinds.get(n, "*i64") for n in names}
    source = ASTSource(
        fn=map_kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 72  # without pieces under Triton 3.6
