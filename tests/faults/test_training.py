"""Training as people do it: loss scaling, accumulation, checkpoints, saved-tensor hooks, inference in between."""

from __future__ import annotations

import pytest
import torch
from layer import Layer, batch, layers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ple_gdn

pytestmark = pytest.mark.usefixtures("one_thread")

HOW = ("eager", "compiled")


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def prepared(how: str, model: nn.Module) -> nn.Module:
    if how == "compiled":
        model.compile(backend="aot_eager", fullgraph=True)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_an_overflow_reaches_every_gradient_and_the_scaler_skips_the_step(how: str, poison: float) -> None:
    model = prepared(how, layers(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for factor, moves in ((poison, False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale((model(batch()).square() * factor).mean()).backward()
        finite = [n for n, p in model.named_parameters() if p.grad.isfinite().all()]
        assert finite == ([n for n, _ in model.named_parameters()] if moves else [])
        scaler.step(optimizer)
        scaler.update()
        moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
        assert bool(moved) == moves
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("how", HOW)
def test_gradients_accumulate_over_microbatches(how: str) -> None:
    model = prepared(how, layers(1))
    parts = [batch(seed=seed) for seed in (1, 2, 3)]
    for part in parts:
        model(part).square().sum().backward()
    accumulated = gradients(model)
    model.zero_grad()
    model(torch.cat(parts)).square().sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(accumulated[name], gradient, rtol=2e-4, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("how", HOW)
def test_inference_saves_nothing_and_trains_on_afterwards(how: str) -> None:
    model, saved = prepared(how, layers(1)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with torch.no_grad():
            expected = model.eval()(batch())
        with torch.inference_mode():
            assert torch.equal(model(batch()), expected)
    assert saved == []
    out = model.train()(batch())
    assert torch.equal(out, expected)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_tensors_offloaded_to_the_cpu_come_back_with_the_same_bits() -> None:
    results = []
    for offload in (False, True):
        model = layers(1)
        with torch.autograd.graph.save_on_cpu() if offload else torch.enable_grad():
            out = model(batch())
        out.square().sum().backward()
        results.append(gradients(model))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@pytest.mark.parametrize("how", HOW)
def test_activation_checkpoints_give_the_same_bits(how: str) -> None:
    results = []
    for wrapped in (False, True):
        model = layers(2)
        run = model
        if wrapped:
            run = lambda x: checkpoint(model[1], checkpoint(model[0], x, use_reentrant=False), use_reentrant=False)  # noqa: B023, E731
        if how == "compiled":
            torch._dynamo.reset()
            run = torch.compile(run, backend="aot_eager", fullgraph=True)
        run(batch()).square().mean().backward()
        results.append(gradients(model))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_the_backend_trains_the_layer_as_eager_does() -> None:
    results = []
    for compiled in (False, True):
        model = layers(1)
        if compiled:
            model.compile(backend="ple_gdn", fullgraph=True, options={"rounding": "eager"})
        model(batch()).square().mean().backward()
        results.append(gradients(model))
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-4, atol=1e-6)


SECOND = {
    "gated_delta_rule": lambda x: ple_gdn.gated_delta_rule(
        *(x.unflatten(-1, (2, 16)),) * 3, -x[..., :2].abs(), x[..., :2].sigmoid(), use_qk_l2norm=True
    )[0],
    "ple_gate_conv": lambda x: ple_gdn.ple_gate_conv(
        x, x, x[..., :16], *(torch.zeros(32),) * 3, torch.ones(32, 1, 4), dilation=3
    ),
    "causal_conv1d": lambda x: ple_gdn.causal_conv1d(x, torch.ones(32, 4)),
    "grouped_rms_norm": lambda x: ple_gdn.grouped_rms_norm(x, torch.zeros(32), group_size=16),
    "gated_residual_down": lambda x: ple_gdn.gated_residual_down(x, 2),
    "gated_residual_mix": lambda x: ple_gdn.gated_residual_mix(x, x, 2),
    "gated_residual_inject": lambda x: ple_gdn.gated_residual_inject(x[..., :16], x, x[..., :2]),
}


@pytest.mark.parametrize("name", SECOND)
def test_create_graph_gives_the_gradient_and_a_second_derivative_is_refused_by_name(name: str) -> None:
    x = torch.randn(1, 9, 32, requires_grad=True)
    y = SECOND[name](x)
    (plain,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.equal(plain, first)
    with pytest.raises(RuntimeError, match=f"ple_gdn.{name} has no second derivative"):
        torch.autograd.grad(first.sum(), x)


class _Regions(nn.Module):
    def __init__(self, count: int, shared: bool) -> None:
        super().__init__()
        made = [Layer() for _ in range(1 if shared else count)]
        self.layers = nn.ModuleList(made)
        self.order = [made[0 if shared else n] for n in range(count)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("shared", [False, True])
def test_the_peak_of_the_backward_holds_one_region_however_many_there_are(shared: bool) -> None:
    """What grows with depth is the saved input of each layer and, unless they share weights, finished gradients."""
    x = batch(1, 130)
    peaks = {}
    for count in (1, 2, 4):
        model = _Regions(count, shared)
        weights = sum(p.nbytes for p in model.parameters()) / (1 if shared else count)
        peak = ple_gdn.plot_memory(model, x, path=None)["replay"].peak
        peaks[count] = peak - count * (x.nbytes + (0 if shared else weights))
    assert peaks[4] <= 1.35 * peaks[2], peaks
