"""Compiled artefacts carried from one process to another: both caches hit, the bits stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import hashlib, json, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters

role, path = sys.argv[1], Path(sys.argv[2])
if role == "load":
    assert torch.compiler.load_cache_artifacts(path.read_bytes()) is not None
def fn(h, k, v, *weights):
    return torch.ops.ple_gdn.ple_gate_conv(h, k, v, *weights, dilation=3)[0].sin()
generator = torch.Generator().manual_seed(0)
h, k, v, *weights = (
    torch.randn(shape, generator=generator, requires_grad=True)
    for shape in ((1, 5, 8), (1, 5, 8), (1, 5, 4), (8,), (8,), (8,), (8, 1, 4))
)
import ple_gdn
out = torch.compile(fn, backend="ple_gdn")(h, k, v, *weights)
out.sum().backward()
if role == "save":
    path.write_bytes(torch.compiler.save_cache_artifacts()[0])
bits = b"".join(t.detach().numpy().tobytes() for t in (out, *(x.grad for x in (h, k, v, *weights))))
found = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")}
found |= {f"fx_{name}": counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
print(json.dumps(found | {"bits": hashlib.sha256(bits).hexdigest()}))
"""


def test_artefacts_saved_in_one_process_are_hits_with_the_same_bits_in_another(tmp_path: Path) -> None:
    def compile_in_a_process(role: str) -> dict[str, int | str]:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache_{role}"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, role, str(tmp_path / "artefacts")]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    saved, loaded = compile_in_a_process("save"), compile_in_a_process("load")
    assert (saved["hit"], saved["miss"], saved["fx_hit"], saved["fx_miss"]) == (0, 1, 0, 2)
    assert (loaded["hit"], loaded["miss"], loaded["fx_hit"], loaded["fx_miss"]) == (1, 0, 2, 0)
    assert loaded["bits"] == saved["bits"]
