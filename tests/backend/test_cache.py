"""Inductor's caches: a second process hits them, a changed option misses, a failed pass is not kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, logging, sys
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
import ple_gdn, ple_gdn.fx_passes
from ple_gdn.fx_passes.records import GraphPass

options, failing = json.loads(sys.argv[1]), sys.argv[2] == "failing"
runs = []
compile_one = cpp_builder.run_compile_cmd
def count(command, **where):
    runs.extend(word for word in command.split() if word.endswith(".main.cpp"))
    return compile_one(command, **where)
cpp_builder.run_compile_cmd = count
warnings = []
class Keep(logging.Handler):
    def emit(self, record):
        warnings.append(record)
logging.getLogger("ple_gdn").addHandler(Keep())
if failing:
    def run(gm, context):
        raise RuntimeError("broken pass")
    ple_gdn.fx_passes.PASSES = (GraphPass("unlucky", "joint", run),)

def fn(h, k, v, *weights):
    return ple_gdn.ple_gate_conv(h, k, v, *weights, dilation=3).sin()

h, k, v = (torch.ones(1, 5, n, requires_grad=True) for n in (8, 8, 4))
weights = [torch.ones(8) for _ in range(3)] + [torch.ones(8, 1, 4)]
torch.compile(fn, backend="ple_gdn", options=options)(h, k, v, *weights).sum().backward()
names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
found = {name: counters["aot_autograd"][name] for name in names}
found.update({name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")})
print(json.dumps({**found, "warnings": len(warnings), "compiler_runs": len(runs)}))
"""


@pytest.fixture
def compile_in_a_process(tmp_path):
    script = tmp_path / "compile.py"
    script.write_text(SCRIPT)

    def run(passes="ours", **options):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        output = subprocess.run(
            [sys.executable, str(script), json.dumps(options), passes],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            check=True,
        )
        return json.loads(output.stdout.splitlines()[-1])

    return run


def test_a_second_process_hits_both_caches_and_a_changed_option_misses(compile_in_a_process):
    first = compile_in_a_process()
    assert (first["autograd_cache_hit"], first["autograd_cache_miss"], first["autograd_cache_bypass"]) == (0, 1, 0)
    assert first["compiler_runs"] == 2  # forward, backward
    second = compile_in_a_process()
    assert (second["autograd_cache_hit"], second["autograd_cache_miss"]) == (1, 0)
    assert (second["fxgraph_cache_hit"], second["fxgraph_cache_miss"]) == (2, 0)
    assert second["compiler_runs"] == 0
    # An option that leaves this very graph as it was: only our part of the key can tell them apart.
    changed = compile_in_a_process(rounding="fast")
    assert (changed["autograd_cache_hit"], changed["autograd_cache_miss"]) == (0, 1)
    assert changed["fxgraph_cache_hit"] == 0


def test_what_a_failing_pass_left_is_compiled_and_reported_in_every_process(compile_in_a_process):
    for _ in range(2):
        found = compile_in_a_process(passes="failing")
        assert found["autograd_cache_hit"] == 0
        assert found["warnings"] == 1
