"""explain, capture_graphs and plot_memory: options first, the function's own keywords, tensors of the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ple_gdn


@pytest.fixture(autouse=True)
def fresh_compiles() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("run", [ple_gdn.explain, ple_gdn.capture_graphs, ple_gdn.plot_memory])
def test_options_are_checked_before_anything_runs_even_where_no_graph_comes_of_it(run):
    def must_not_run():
        raise AssertionError

    for fn in (must_not_run, None):
        with pytest.raises(ValueError, match="Did you mean 'save_mode'"):
            run(fn, options={"save_mod": "full"})
        with pytest.raises(TypeError, match="options: expected a dict"):
            run(fn, options=["fuse"])
    # Without a graph the good ones are nobody's business.
    assert ple_gdn.explain(lambda: 3, options={"fuse": False}).graphs == 0


def test_a_keyword_named_fn_reaches_the_function():
    def apply(x, fn, self=None):
        return fn(x) + self

    x = torch.ones(2)
    assert "sin" in ple_gdn.capture_graphs(apply, x, fn=torch.sin, self=x).dynamo[0]
    assert ple_gdn.explain(apply, x, fn=torch.sin, self=x).graphs == 1
    with pytest.raises(ValueError, match="fn: expected a gated delta rule in a checkpoint region"):
        ple_gdn.plot_memory(apply, x, fn=torch.sin, self=x, path=None)


def meta_cases() -> list[Callable[..., torch.Tensor]]:
    def chain(x, w):
        return torch.sigmoid(x @ w) * 2

    def with_random_numbers(x, w):
        return torch.nn.functional.dropout(x @ w, 0.5).sin()

    def in_a_region(x, w):
        return checkpoint(chain, x, w, use_reentrant=False).cos()

    def random_in_a_region(x, w):
        return checkpoint(with_random_numbers, x, w, use_reentrant=False).cos()

    def after_a_break(x, w):
        y = chain(x, w)
        torch._dynamo.graph_break()
        return y.exp()

    return [chain, with_random_numbers, in_a_region, random_in_a_region, after_a_break]


@pytest.mark.parametrize("fn", meta_cases(), ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("trained", [True, False])
def test_tensors_of_the_meta_device_give_the_graphs_of_real_ones(fn, trained):
    if fn.__name__ == "random_in_a_region" and not trained:
        pytest.skip("torch compiles no checkpoint region with random numbers where nothing needs a gradient")

    def texts(device):
        x, w = (torch.randn(n, 4, requires_grad=trained, device=device) for n in (3, 4))
        graphs = ple_gdn.capture_graphs(fn, x, w)
        return [text for stage in (graphs.joint, graphs.forward, graphs.backward) for text in stage]

    real, meta = texts("cpu"), texts("meta")
    # Random numbers come of Inductor's own generator on the devices it knows.
    if "random" in fn.__name__:
        assert len(real) == len(meta) >= 1
        assert all("aten.mm" in text for text in meta)
    else:
        assert [text.replace("'meta'", "'cpu'") for text in meta] == real
