"""Functions of transformers and FLA are one op in a trace, and themselves wherever the op does not cover a call."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import ple_gdn
from hf import tiny
from hf.capture import Capture, fresh
from ple_gdn.substitutions import HF_FAMILIES, SUBSTITUTIONS, install_substitutions

pytest.importorskip("transformers")
TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _forget() -> None:
    fresh()


def run_python(source: str, *paths: Path) -> str:
    """Runs `source` in a process of its own, `paths` importable, and gives what it prints."""
    lines = "\n".join(f"sys.path.insert(0, {str(path)!r})" for path in (*paths, TESTS))
    code = f"import sys\n{lines}\n" + textwrap.dedent(source)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rule_inputs(width: int = 16, tokens: int = 40, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # As many key as value heads: before 5.24 the function itself knew no grouped values.
    q, k, v = (rand(1, tokens, 2, width) for _ in range(3))
    g, beta = -rand(1, tokens, 2).abs(), rand(1, tokens, 2).sigmoid()
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, beta]


def chunk_rule(family: str = "qwen4_exp"):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}").torch_chunk_gated_delta_rule


def test_every_listed_function_of_transformers_exists():
    found = 0
    for entry in SUBSTITUTIONS:
        if entry.module.startswith("transformers.models.lara_mini"):  # only in the newest releases
            continue
        if entry.module.startswith("transformers"):
            assert callable(getattr(importlib.import_module(entry.module), entry.name)), entry
            found += 1
    assert found == 2 * (len(HF_FAMILIES) - 1) + 1


def test_installing_twice_changes_nothing():
    install_substitutions()
    before = list(sys.meta_path)
    install_substitutions()
    assert sys.meta_path == before


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen4_exp", "layers"),
        ("qwen3_5", "whole"),
        *(pytest.param(f, "whole", marks=pytest.mark.slow) for f in tiny.BUILDERS if f != "qwen3_5"),
    ],
)
def test_each_linear_layer_is_one_rule_and_one_convolution(family: str, how: str):
    model, ids = tiny.build(family), tiny.tokens(2, 70)
    logits, grads = tiny.step(model, ids)
    capture = Capture()
    tiny.compile_model(model, how, capture, fullgraph=True)
    ours, our_grads = tiny.step(model, ids)
    layers = sum(hasattr(layer, "linear_attn") for layer in model.model.layers)
    # Per layer, the three alike share one graph and the PLE layer has its own.
    expected = layers if how == "whole" else 2
    assert capture.count("gated_delta_rule") == capture.count("causal_conv1d") == expected
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    name, ratio = tiny.worst_gradient(our_grads, grads)
    assert ratio <= 1, (name, ratio)


def test_ten_lengths_need_at_most_four_graphs():
    model, capture = tiny.build(**tiny.TWO_LAYERS), Capture()
    tiny.compile_model(model, "layers", capture, fullgraph=True)
    with torch.no_grad():
        for length in (128, 130, 192, 200, 256, 300, 384, 511, 512, 1024):
            model(input_ids=tiny.tokens(1, length), use_cache=False)
    assert len(capture.graphs) <= 4


def test_a_packed_model_of_the_meta_device_is_explained_as_a_real_one():
    def explained(device: str) -> str:
        model, ids = tiny.build(**tiny.TWO_LAYERS).to(device), tiny.tokens(1, 40).to(device)
        boundaries = torch.tensor([0, 7, 40], dtype=torch.int32, device=device)
        return str(ple_gdn.explain(model, input_ids=ids, labels=ids, use_cache=False, cu_seq_lens_q=boundaries))

    real = explained("cpu")
    for part in ("gated_delta_rule", "causal_conv1d", "tapes: 2"):
        assert part in real
    assert explained("meta") == real


def test_checkpointing_keeps_one_rule_per_layer():
    model, ids = tiny.build(**tiny.TWO_LAYERS), tiny.tokens(1, 40)
    _, grads = tiny.step(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    capture = Capture()
    tiny.compile_model(model, "whole", capture, fullgraph=True)
    _, ours = tiny.step(model, ids)
    assert capture.count("gated_delta_rule") == capture.count("ple_gate_conv") + 1 == 2
    name, ratio = tiny.worst_gradient(ours, grads)
    assert ratio <= 1, (name, ratio)


@pytest.mark.parametrize(
    ("width", "extra"),
    [(8, {}), (16, {"chunk_size": 32}), (16, {"unknown_argument": 1})],
    ids=["head width", "chunk size", "unknown argument"],
)
def test_a_call_the_op_does_not_cover_traces_the_original(width: int, extra: dict):
    inputs, rule, capture = rule_inputs(width), chunk_rule(), Capture()

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return rule(*tensors, use_qk_l2norm_in_kernel=True, **extra)[0]

    assert torch.equal(torch.compile(call, backend=capture, fullgraph=True)(*inputs), call(*inputs))
    assert not capture.ops()


@pytest.mark.parametrize("extra", [{"unknown_argument": 1}, {"chunk_size": 32}], ids=["unknown argument", "chunk size"])
def test_a_packed_call_the_op_does_not_cover_raises(extra: dict):
    inputs, rule = rule_inputs(), chunk_rule()
    bounds = torch.tensor([0, 10, 40], dtype=torch.int32)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return rule(*tensors, cu_seqlens=bounds, **extra)[0]

    with pytest.raises(Exception, match="cannot keep packed documents"):
        torch.compile(call, backend=Capture(), fullgraph=True)(*inputs)


def test_gates_and_states_match_the_original():
    inputs, rule, capture = rule_inputs(dtype=torch.bfloat16), chunk_rule(), Capture()
    state = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(2))

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rule(*tensors, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    ours, theirs = torch.compile(call, backend=capture, fullgraph=True)(*inputs), call(*inputs)
    assert capture.count("gated_delta_rule") == 1
    assert ours[0].dtype == torch.bfloat16
    assert ours[1].dtype == torch.float32
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(ours[1], theirs[1], rtol=2e-2, atol=2e-3)


def test_export_sees_the_original_function():
    rule = chunk_rule()

    class Layer(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return rule(*tensors)[0]

    program = torch.export.export(Layer(), tuple(rule_inputs(tokens=8)), strict=True)
    assert "ple_gdn" not in str(program.graph)


def test_cached_generation_is_that_of_eager():
    model, ids = tiny.build("qwen3_next").eval(), tiny.tokens(1, 12)
    settings = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "disable_compile": True}
    expected = model.generate(ids, **settings)
    tiny.compile_model(model, "layers", Capture())
    assert torch.equal(model.generate(ids, **settings), expected)


def test_a_model_imported_after_the_backend_and_a_reset_is_served():
    printed = run_python(
        """
        import torch, ple_gdn.backend
        torch._dynamo.reset()
        from hf import tiny
        from hf.capture import Capture
        model, capture = tiny.build("qwen3_5"), Capture()
        tiny.compile_model(model, "whole", capture, fullgraph=True)
        tiny.step(model, tiny.tokens(1, 20))
        print(capture.count("gated_delta_rule"), len(capture.graphs))
        """
    )
    assert printed.split() == ["2", "1"]


STAND_IN = """
import torch

@torch.compiler.disable
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                           state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
                           cp_context=None, **kwargs):
    return v * 7, None
"""


def test_fla_is_taken_over_where_the_op_covers_it(tmp_path: Path):
    folder = tmp_path / "fla" / "ops" / "gated_delta_rule"
    folder.mkdir(parents=True)
    for path in (tmp_path / "fla", tmp_path / "fla" / "ops"):
        (path / "__init__.py").touch()
    (folder / "chunk.py").write_text(STAND_IN)
    (folder / "__init__.py").write_text("from .chunk import chunk_gated_delta_rule\n")
    printed = run_python(
        """
        import torch
        from hf import tiny
        from hf.capture import Capture
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        model, ids = tiny.build("qwen3_5"), tiny.tokens(1, 20)
        capture = Capture()
        tiny.compile_model(model, "whole", capture, fullgraph=True)
        tiny.step(model, ids, cu_seq_lens_q=torch.tensor([0, 9, 20]))
        print("model", capture.count("gated_delta_rule"), len(capture.graphs))

        q, v, g = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 4, 16), -torch.rand(1, 20, 4)
        def direct(**extra):
            return chunk_gated_delta_rule(q, q, v, g, g.exp(), use_qk_l2norm_in_kernel=True, **extra)[0]
        capture = Capture()
        out = torch.compile(direct, backend=capture, fullgraph=True)(cu_seqlens=torch.tensor([0, 9, 20]), scale=0.5)
        print("direct", capture.count("gated_delta_rule"), bool((out != v * 7).any()))
        capture = Capture()
        print("eager", bool((direct() == v * 7).all()))
        out = torch.compile(direct, backend=capture)(use_gate_in_kernel=True, A_log=g[0, 0], dt_bias=g[0, 0])
        print("uncovered", capture.count("gated_delta_rule"), bool((out == v * 7).all()))
        """,
        tmp_path,
    )
    assert printed.split("\n")[:4] == ["model 2 1", "direct 1 True", "eager True", "uncovered 0 True"]
