"""What every public entry point refuses, takes or never does, whichever op stands behind it."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from oracles.gdn import make_case, oracle, relative_rms
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ple_gdn

pytestmark = pytest.mark.usefixtures("one_thread")

FUNCTIONS = sorted(n for n in ple_gdn.__all__ if inspect.isfunction(getattr(ple_gdn, n)))


# These call the caller's own function with the caller's own arguments.
FORWARDING = {"explain", "capture_graphs", "plot_memory"}


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in FORWARDING])
def test_a_misspelt_keyword_is_refused(name: str) -> None:
    """No entry point swallows arguments: `cp_context=` for `cp=` would start every rank from a zero state."""
    front = getattr(ple_gdn, name)
    parameters = inspect.signature(front).parameters.values()
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    required = [p for p in parameters if p.default is p.empty]
    given = {p.name: None for p in required}
    with pytest.raises(TypeError, match="unexpected keyword argument 'cp_context'"):
        front(**given, cp_context=None)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "cp" in inspect.signature(getattr(ple_gdn, n)).parameters])
def test_the_context_of_a_context_parallel_call_is_not_swallowed(name: str) -> None:
    front = getattr(ple_gdn, name)
    given = {p.name: torch.zeros(1) for p in inspect.signature(front).parameters.values() if p.default is p.empty}
    shapes = {"H": 1, "HV": 1, "K": 16, "V": 16, "dtype": torch.float32, "dilation": 3}
    given |= {n: x for n, x in shapes.items() if n in given}
    given |= {n: x for n, x in {"cu_seqlens": torch.tensor([0, 1])}.items() if n in given}
    with pytest.raises(TypeError, match=r"cp: expected"):
        front(**given, cp="not a context")


WITHOUT_TRITON = """
import sys
for name in ("triton", "triton.language", "fla", "causal_conv1d", "transformers"):
    sys.modules[name] = None
import torch, ple_gdn
x = torch.randn(1, 9, 1, 16, requires_grad=True)
g = -torch.rand(1, 9, 1)
boundaries = torch.tensor([0, 4, 9])
o, _ = ple_gdn.gated_delta_rule(x, x, x, g, torch.rand(1, 9, 1), use_qk_l2norm=True, cu_seqlens=boundaries)
h = torch.randn(1, 9, 8, requires_grad=True)
w = torch.zeros(8)
out = ple_gdn.ple_gate_conv(h, h, h[..., :4], w, w, w, torch.ones(8, 1, 4), dilation=3, cu_seqlens=boundaries)
y = ple_gdn.causal_conv1d(h, torch.ones(8, 4), activation="silu", cu_seqlens=boundaries)
z = ple_gdn.gated_residual_mix(ple_gdn.grouped_rms_norm(h, w, group_size=4), ple_gdn.gated_residual_down(h, 2), 2)
r = ple_gdn.gated_residual_inject(z, h, h[..., :2])
compiled = torch.compile(lambda x: x.sin() + x, backend="ple_gdn")
sum(t.square().sum() for t in (o, out, y, r, compiled(h))).backward()
assert x.grad.isfinite().all() and h.grad.isfinite().all()
from ple_gdn.ops.triton_support import missing_triton
print(missing_triton())
"""


def test_every_op_and_the_backend_run_on_the_cpu_without_any_optional_package() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "triton cannot be imported" in done.stdout


@pytest.mark.parametrize("widths", [*itertools.product((8, 16, 48, 64, 80, 96, 128, 192, 256, 272), repeat=2)])
def test_a_head_width_is_computed_in_full_or_refused(widths: tuple[int, int]) -> None:
    key_width, value_width = widths
    tensors = [torch.zeros(1, 2, 1, n, device="meta") for n in (key_width, key_width, value_width)]
    gates = [torch.zeros(1, 2, 1, device="meta")] * 2
    if all(16 <= n <= 256 for n in widths):
        assert ple_gdn.gated_delta_rule(*tensors, *gates)[0].shape == (1, 2, 1, value_width)
    else:
        with pytest.raises(ValueError, match=r"16 to 256 in steps of 16, got (8|272)"):
            ple_gdn.gated_delta_rule(*tensors, *gates)


def test_chunks_shorter_than_the_history_and_a_loss_on_the_final_state_are_right() -> None:
    case = make_case((1, 2, 1, 2, 3), heads=1, value_heads=2)
    expected = oracle(case, 0.25, True)
    state, outputs, leaves = case.initial_state, [], [x.clone().requires_grad_() for x in case[:6]]
    # The first document token by token: the state goes from call to call.
    for n, (start, end) in enumerate(itertools.pairwise(case.boundaries)):
        state = leaves[5][n : n + 1]
        for t in range(start, end):
            rows = (x[:, t : t + 1] for x in leaves[:5])
            o, state = ple_gdn.gated_delta_rule(*rows, initial_state=state, output_final_state=True, use_qk_l2norm=True)
            outputs.append((o, case.do[:, t : t + 1]))
        outputs.append((state, case.dfinal_state[n : n + 1]))
    grads = torch.autograd.grad([o for o, _ in outputs], leaves, [dy for _, dy in outputs])
    for name, grad in zip(("dq", "dk", "dv", "dg", "dbeta", "dinitial_state"), grads, strict=True):
        assert relative_rms(grad, expected[name]) < 1e-5, name


@pytest.mark.parametrize(("tokens", "world"), [(3, 4), (7, 2), (0, 2), (8, 2)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
def test_every_token_of_a_pack_has_one_owner_whatever_the_ranks(tokens: int, world: int, layout: str) -> None:
    boundaries = [0, 5, 8] if tokens == 8 else [0, tokens]
    part = ple_gdn.kcp_partition(boundaries, world, layout)
    owned = [row for rank in range(world) for row in part.positions(rank).tolist()]
    assert sorted(owned) == list(range(tokens))


def test_boundaries_of_a_shard_are_not_those_of_the_pack_divided() -> None:
    """Rank 1 of 2 holds rows 4 to 7 of one document: [0, 4] locally, continued from rank 0; and [0,5,8] stays whole."""
    part = ple_gdn.kcp_partition([0, 8], 2)
    assert part.local_cu_seqlens(1) == [0, 4]
    assert [f.has_pred for f in part.by_rank[1]] == [True]
    part = ple_gdn.kcp_partition([0, 5, 8], 2)
    assert [part.local_cu_seqlens(rank)[-1] for rank in range(2)] == [4, 4]
    assert [(f.document, f.end - f.start) for f in part.fragments] == [(0, 4), (0, 1), (1, 3)]


def test_the_decay_stays_in_float32_where_the_model_is_cast_to_bfloat16() -> None:
    x = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16)
    gate = torch.zeros(1, 4, 1, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="g: expected dtype float32, got bfloat16"):
        ple_gdn.gated_delta_rule(x, x, x, gate, gate)


def test_the_package_holds_no_table_and_no_module_of_its_own() -> None:
    """No embedding to allocate, offload or sparsely update: the n-gram tables stay the model's, and their gradient."""
    assert not any(
        isinstance(value, type) and issubclass(value, torch.nn.Module)
        for value in (getattr(ple_gdn, name) for name in ple_gdn.__all__)
    )
    assert not any("embed" in str(schema) for schema in torch._C._dispatch_get_all_op_names() if "ple_gdn" in schema)


def test_a_row_of_a_bfloat16_table_that_all_tokens_hit_gets_its_whole_gradient() -> None:
    """Compiled it is summed in float32; eager adds in bfloat16 and loses 30 % of it."""
    table = torch.nn.Embedding(1000, 16).bfloat16()
    ids = torch.zeros(32, 16, dtype=torch.int64)
    torch._dynamo.reset()
    torch.compile(lambda ids: table(ids).float().square().sum(), backend="ple_gdn", fullgraph=True)(ids).backward()
    gradient = table.weight.grad
    assert gradient.shape == table.weight.shape
    torch.testing.assert_close(gradient[0].double(), 2 * 512 * table.weight[0].double(), rtol=4e-3, atol=0.0)
    assert not gradient[1:].any()


def _counted(fn: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, backend=counter, fullgraph=True), counter


def test_lengths_counts_and_the_sizes_zero_and_one_compile_a_known_number_of_times() -> None:
    run, counter = _counted(
        lambda q, k, v, g, beta, cu_seqlens: ple_gdn.gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm=True, cu_seqlens=cu_seqlens
        )[0]
    )

    def step(lengths: tuple[int, ...]) -> None:
        case = make_case(lengths, heads=1, value_heads=1)
        run(*(x.requires_grad_() for x in case[:5]), torch.tensor(case.boundaries)).sum().backward()

    for at in range(20):
        step((9 + at, *([2 + at % 3] * (at % 5 + 1))))
    varying = counter.frame_count
    assert varying <= 2
    step((1,))
    step((7,))
    step((0,))
    assert counter.frame_count <= varying + 3
