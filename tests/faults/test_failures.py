"""When something around the ops fails: Triton, the GPU, memory, a pass, the user's patience, the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles.gdn import make_case
from oracles.ple import ple_inputs
from torch import Tensor

import ple_gdn
import ple_gdn.fx_passes
from ple_gdn.fx_passes.records import GraphPass
from ple_gdn.ops import triton_support

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def _asked_afresh():
    caches = (triton_support.missing_triton, triton_support._warn_once, triton_support._check_capability)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _stand_in(**attributes: object) -> types.ModuleType:
    module = types.ModuleType("triton")
    vars(module).update(attributes)
    return module


BROKEN = {
    "not installed": (None, "ModuleNotFoundError|ImportError"),
    "an empty folder": (_stand_in(), "ModuleNotFoundError|AttributeError"),
    "no version": (_stand_in(language=types.ModuleType("triton.language")), "AttributeError"),
}


@pytest.mark.usefixtures("_asked_afresh")
@pytest.mark.parametrize("kind", BROKEN)
def test_a_missing_or_broken_triton_is_a_reason_and_one_warning(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, error = BROKEN[kind]
    monkeypatch.setitem(sys.modules, "triton", module)
    language = getattr(module, "language", None)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    cuda = torch.device("cuda", 0)
    assert [triton_support.triton_ready(cuda) for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("triton cannot be imported (")
    assert any(name in caplog.text for name in error.split("|"))


@pytest.mark.usefixtures("_asked_afresh")
def test_a_triton_that_is_too_old_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", _stand_in(__version__="3.1.0"))
    monkeypatch.setitem(sys.modules, "triton.language", types.ModuleType("triton.language"))
    with pytest.raises(RuntimeError, match=r"need triton >= 3.6, found 3.1.0; install the triton that belongs"):
        triton_support.triton_ready(torch.device("cuda", 0))


def _gdn_step() -> tuple[Tensor, list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in make_case((70,))[:5]]
    return ple_gdn.gated_delta_rule(*leaves, use_qk_l2norm=True)[0], leaves


def _ple_step() -> tuple[Tensor, list[Tensor]]:
    leaves = ple_inputs(1, 20, 2, 8, 4, requires_grad=True)
    return ple_gdn.ple_gate_conv(*leaves, dilation=3), leaves


STEPS = {
    "gdn": (_gdn_step, "ple_gdn.ops.gated_delta_rule.reference.backward"),
    "ple": (_ple_step, "ple_gdn.ops.ple.reference_backward.ple_gate_conv_backward_reference"),
}


@pytest.mark.parametrize("name", STEPS)
def test_out_of_memory_inside_a_backward_leaks_nothing_and_the_next_step_works(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, inner = STEPS[name]
    out, leaves = step()
    expected = torch.autograd.grad(out.sum(), leaves)

    def out_of_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (mocked)")

    with monkeypatch.context() as patch:
        patch.setattr(inner, out_of_memory)
        out, leaves = step()
        watched = [weakref.ref(x) for x in (out, *leaves)]
        with pytest.raises(torch.OutOfMemoryError, match="mocked"):
            out.sum().backward()
        assert all(x.grad is None for x in leaves)
        del out, leaves
    assert [ref() for ref in watched] == [None] * len(watched)
    out, leaves = step()
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True))


@pytest.mark.parametrize("stage", ["dynamo", "joint"])
def test_an_interrupted_compile_leaves_nothing_behind(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = []

    def interrupt(gm: torch.fx.GraphModule, context: object) -> None:
        hits.append(stage)
        if len(hits) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(ple_gdn.fx_passes, "PASSES", (GraphPass("slow", stage, interrupt),))
    monkeypatch.setattr(ple_gdn.fx_passes, "FUSIONS", ())
    torch._dynamo.reset()
    reports = len(ple_gdn.compile_reports())
    compiled = torch.compile(lambda x: x.sin() * x, backend="ple_gdn", fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        with pytest.raises(KeyboardInterrupt):
            compiled(x)
        assert len(ple_gdn.compile_reports()) == reports
        torch.testing.assert_close(compiled(x), x.sin() * x)
    assert len(hits) >= 2
    assert ple_gdn.last_report().failures == ()


READ_ONLY = """
import os, sys, torch, torch._inductor.compile_fx, ple_gdn.backend
def fn(x):
    return x.sin() * x
x = torch.randn(5, requires_grad=True)
if os.geteuid() == 0:
    os.seteuid(65534)  # permissions do not bind root
outcome = []
for backend in ("inductor", "ple_gdn"):
    torch._dynamo.reset()
    try:
        y = torch.compile(fn, backend=backend)(x)
        outcome.append(bool(torch.allclose(y, fn(x))))
    except Exception as error:
        outcome.append(f"{type(error).__name__}: {error}".splitlines()[0])
print(outcome[0] == outcome[1], outcome)
"""


def test_a_cache_directory_that_cannot_be_written_is_met_as_inductor_meets_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o555)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", READ_ONLY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("True"), done.stdout + done.stderr[-2000:]


def _bad(message: str, error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error, match=message):
        call()


def test_wrong_kinds_of_argument_are_named() -> None:
    x, one = torch.ones(2, 4), torch.ones(4)
    _bad("fn: expected a module or a function, got NoneType", TypeError, lambda: ple_gdn.explain(None))
    _bad("fn: expected a module or a function, got str", TypeError, lambda: ple_gdn.capture_graphs("forward"))
    _bad("options: expected a dict .* got 3", TypeError, lambda: ple_gdn.explain(torch.sin, x, options=3))
    for eps in (0.0, -1e-6, float("nan")):
        _bad(
            "eps: expected a positive number",
            ValueError,
            lambda eps=eps: ple_gdn.grouped_rms_norm(x, one, group_size=2, eps=eps),
        )
    nowhere = torch.tensor([0, 2], device="meta")
    rows, gate = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1)
    _bad(
        "cu_seqlens: expected device cpu .* got meta",
        ValueError,
        lambda: ple_gdn.gated_delta_rule(rows, rows, rows, gate, gate, cu_seqlens=nowhere),
    )
    _bad(
        "cu_seqlens: expected a tensor with values, got one on the meta device",
        ValueError,
        lambda: ple_gdn.gdn_saved_bytes(nowhere, 1, 1, 16, 16, dtype=torch.float32),
    )
