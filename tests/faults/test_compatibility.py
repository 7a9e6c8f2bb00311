"""What else torch offers around a model: export, packages, function transforms, autocast, modes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layer import Layer, batch, layers
from torch import Tensor, nn
from torch.autograd import forward_ad

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def test_an_exported_layer_holds_our_ops_takes_other_lengths_and_equals_eager() -> None:
    model = layers(1)[0].eval()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, (batch(),), dynamic_shapes=({1: length},))
    names = {str(n.target).split(".")[1] for n in program.graph.nodes if str(n.target).startswith("ple_gdn.")}
    assert names == {
        *("gated_delta_rule", "ple_gate_conv", "causal_conv1d", "grouped_rms_norm"),
        *("gated_residual_down", "gated_residual_mix", "gated_residual_inject"),
    }
    for tokens in (20, 7, 65):
        x = batch(2, tokens)
        assert torch.equal(program.module()(x), model(x))


@pytest.mark.slow
def test_an_aot_inductor_package_of_a_forward_equals_eager(tmp_path: Path) -> None:
    model = layers(1)[0].eval()
    with torch.no_grad():
        program = torch.export.export(model, (batch(),))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        packaged = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(packaged(batch()), model(batch()))


TRANSFORMS = {
    "grad": (lambda fn, x: torch.func.grad(fn)(x), RuntimeError, "functorch transforms"),
    "hessian": (
        lambda fn, x: torch.func.hessian(fn)(x),
        (RuntimeError, TypeError),
        "functorch transforms|forward-mode",
    ),
    "jvp": (lambda fn, x: torch.func.jvp(fn, (x,), (x,)), TypeError, "gated_residual_down has no forward-mode"),
    "jacfwd": (lambda fn, x: torch.func.jacfwd(fn)(x), TypeError, "gated_residual_down has no forward-mode"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_function_transform_over_a_raw_op_is_refused_and_never_wrong(name: str) -> None:
    """Torch itself takes a missing forward-mode formula for a zero tangent."""
    transform, error, message = TRANSFORMS[name]
    with pytest.raises(error, match=message):
        transform(lambda x: torch.ops.ple_gdn.gated_residual_down(x, 2).square().sum(), torch.randn(3, 8))


def test_a_dual_number_given_to_a_raw_op_is_refused() -> None:
    x = torch.randn(3, 8)
    with forward_ad.dual_level(), pytest.raises(TypeError, match="gated_residual_down has no forward-mode"):
        torch.ops.ple_gdn.gated_residual_down(forward_ad.make_dual(x, x), 2)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_under_autocast_gradients_have_the_dtype_of_their_parameter(how: str) -> None:
    model = layers(1)
    if how == "compiled":
        model.compile(backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(batch())
    out.float().square().mean().backward()
    reference = layers(1)
    reference(batch()).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype == ours.dtype
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.1, f"{name}: {error:.2e}"


def test_a_length_marked_dynamic_gives_one_graph() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = Layer()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for tokens in (20, 31, 64, 7):
        x = batch(2, tokens)
        torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(x), model(x))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_every_mode_trains_the_layer(mode: str) -> None:
    results: list[list[Tensor]] = []
    for compiled in (False, True):
        model: nn.Module = layers(1)
        if compiled:
            model.compile(backend="ple_gdn", mode=mode)
        model(batch()).square().mean().backward()
        results.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
