"""Gated delta rule as a registered op: opcheck, compilation, bad input, what is refused."""

from __future__ import annotations

import pytest
import torch
from oracles.gdn import NAMES, assert_same_bits, make_case, run_front
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import ple_gdn

pytestmark = pytest.mark.usefixtures("one_thread")

OP = torch.ops.ple_gdn.gated_delta_rule.default
BACKWARD = torch.ops.ple_gdn.gated_delta_rule_backward.default


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65])
@pytest.mark.parametrize(
    "options", [{}, {"output_final_state": True, "use_qk_l2norm": True, "save_mode": "full", "scale": 1.0}]
)
def test_opcheck_passes_with_and_without_options(tokens: int, options: dict) -> None:
    case = make_case((tokens,))
    inputs = [x.requires_grad_() for x in case[:5]]
    torch.library.opcheck(OP, tuple(inputs), options)
    state = case.initial_state.requires_grad_() if options else None
    packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries))
    torch.library.opcheck(OP, (*inputs, state, *packing, torch.zeros(1 << 24, dtype=torch.uint8)), options)


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_opcheck_passes_with_strided_inputs(layout: str) -> None:
    case = make_case((65,), heads=2, value_heads=2)
    if layout == "transposed":
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in case[:5]]
    else:
        inputs = [x[:, :1].expand_as(x).requires_grad_() for x in case[:5]]
    torch.library.opcheck(OP, tuple(inputs), {"save_mode": "none", "use_qk_l2norm": True})


@pytest.mark.parametrize("save_mode", ["none", "light", "full"])
@pytest.mark.parametrize("tokens", [0, 1, 65])
def test_opcheck_passes_for_the_backward(tokens: int, save_mode: str) -> None:
    case = make_case((tokens,), dtype=torch.bfloat16)
    tapes = OP(*case[:5], save_mode=save_mode)[2:]
    torch.library.opcheck(BACKWARD, (case.do, None, *case[:5], None, None, None, None, *tapes), {})
    packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries))
    tapes = OP(*case[:6], *packing, save_mode=save_mode)[2:]
    expanded = case.do[:1, :1].sum().expand_as(case.do)
    torch.library.opcheck(BACKWARD, (expanded, case.dfinal_state, *case[:6], *packing, None, *tapes), {})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_full_graph_trains_to_the_bits_of_eager(backend: str) -> None:
    case = make_case((70, 3), dtype=torch.bfloat16)
    leaves = [x.clone().requires_grad_() for x in case[:6]]

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(boundaries: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ple_gdn.gated_delta_rule(
            *tensors[:5], initial_state=tensors[5], output_final_state=True, use_qk_l2norm=True, cu_seqlens=boundaries
        )

    outputs = compiled(torch.tensor(case.boundaries), *leaves)
    grads = torch.autograd.grad(outputs, leaves, (case.do, case.dfinal_state))
    assert_same_bits(dict(zip(NAMES, (*outputs, *grads), strict=True)), run_front(case))


def test_lengths_and_document_counts_share_two_graphs() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, v, g, beta, packing):
        return ple_gdn.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True, cu_seqlens=packing, save_mode="full")[0]

    for at in range(6):
        lengths = (70 + 9 * at, *([3 + at] * (at + 1)))
        case = make_case(lengths)
        packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries))
        inputs = [x.clone().requires_grad_() for x in case[:5]]
        compiled(*inputs, packing).sum().backward()
        eager = [x.clone().requires_grad_() for x in case[:5]]
        ple_gdn.gated_delta_rule(*eager, use_qk_l2norm=True, cu_seqlens=packing, save_mode="full")[0].sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, eager, strict=True))
    assert counter.frame_count <= 2


def test_double_backward_is_refused() -> None:
    case = make_case((5,))
    leaves = [x.requires_grad_() for x in case[:5]]
    o, _ = ple_gdn.gated_delta_rule(*leaves)
    (dq,) = torch.autograd.grad(o.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_delta_rule has no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("transform", "compiled"),
    [("grad", False), ("jvp", False), ("vjp", False), ("dual", False), ("grad", True), ("jvp", True), ("vjp", True)],
)
def test_forward_mode_and_function_transforms_are_refused(transform: str, compiled: bool) -> None:
    q, *rest = make_case((5,))[:5]

    def loss(q: torch.Tensor) -> torch.Tensor:
        return ple_gdn.gated_delta_rule(q, *rest)[0].sum()

    def dual(q: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(loss(forward_ad.make_dual(q, torch.ones_like(q)))).tangent

    call = {
        "grad": lambda q: torch.func.grad(loss)(q),
        "jvp": lambda q: torch.func.jvp(loss, (q,), (torch.ones_like(q),)),
        "vjp": lambda q: torch.func.vjp(loss, q),
        "dual": dual,
    }[transform]
    torch._dynamo.reset()
    with pytest.raises(TypeError, match="q: expected a tensor for reverse-mode autograd"):
        (torch.compile(call, backend="eager") if compiled else call)(q)


def test_vmap_maps_over_batches() -> None:
    q, *rest = make_case((5,))[:5]
    mapped = torch.func.vmap(lambda q: ple_gdn.gated_delta_rule(q, *rest)[0])(torch.stack([q, 2 * q]))
    assert torch.equal(mapped[1], ple_gdn.gated_delta_rule(2 * q, *rest)[0])


def test_tapes_carry_no_gradient() -> None:
    o, final_state, *tapes = OP(*(x.requires_grad_() for x in make_case((70,))[:5]))
    assert o.requires_grad
    assert not final_state.requires_grad
    assert not any(tape.requires_grad for tape in tapes)


def _bad_inputs() -> dict[str, tuple[type[Exception], str, dict]]:
    q, k, v, g, beta, state, _, _, _ = make_case((40,))
    index = lambda *values: torch.tensor(values)  # noqa: E731
    return {
        "q rank": (ValueError, r"q: expected 4 dimensions \[B, T, H, K\]", {"q": q[0]}),
        "k shape": (ValueError, "k: expected shape", {"k": k[:, :39]}),
        "v rank": (ValueError, "v: expected 4 dimensions", {"v": v[0]}),
        "v tokens": (ValueError, "v: expected shape", {"v": v[:, :39]}),
        "g shape": (ValueError, "g: expected shape", {"g": g[..., :2]}),
        "beta shape": (ValueError, "beta: expected shape", {"beta": beta[..., None]}),
        "k dtype": (TypeError, "k: expected dtype torch.float32", {"k": k.bfloat16()}),
        "v dtype": (TypeError, "v: expected dtype torch.float32", {"v": v.double()}),
        "q dtype": (TypeError, "q: expected dtype", {"q": q.long()}),
        "g dtype": (TypeError, "g: expected dtype float32, got bfloat16", {"g": g.bfloat16()}),
        "beta dtype": (TypeError, "beta: expected dtype", {"beta": beta.long()}),
        "device": (ValueError, "v: expected device cpu", {"v": v.to("meta")}),
        "heads": (
            ValueError,
            "positive multiple of H = 2, got HV = 3",
            {"v": v[:, :, :3], "g": g[..., :3], "beta": beta[..., :3]},
        ),
        "key width": (
            ValueError,
            "head width K to be 16 to 256 in steps of 16, got 8",
            {"q": q[..., :8], "k": k[..., :8]},
        ),
        "value width": (ValueError, "head width V .* got 24", {"v": v[..., :24]}),
        "state count": (ValueError, "initial_state: expected shape", {"initial_state": torch.cat([state, state])}),
        "state dtype": (TypeError, "initial_state: expected dtype float32", {"initial_state": state.bfloat16()}),
        "decreasing": (ValueError, "cu_seqlens: expected non-decreasing", {"cu_seqlens": index(0, 30, 20)}),
        "not from 0": (ValueError, "cu_seqlens: expected the first entry to be 0", {"cu_seqlens": index(1, 30)}),
        "past T": (
            ValueError,
            "cu_seqlens: expected the last entry to be at most T = 40",
            {"cu_seqlens": index(0, 41)},
        ),
        "float": (TypeError, "cu_seqlens: expected dtype int32, int64", {"cu_seqlens": index(0.0, 40.0)}),
        "2-D": (ValueError, "cu_seqlens: expected 1 dimensions", {"cu_seqlens": index(0, 40)[None]}),
        "list": (TypeError, "cu_seqlens: expected a torch.Tensor or the Packing", {"cu_seqlens": [0, 40]}),
        "batch": (
            ValueError,
            "cu_seqlens: expected inputs with batch size 1",
            {n: torch.cat([x, x]) for n, x in zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta), strict=True)}
            | {"cu_seqlens": index(0, 40)},
        ),
        "packing of another chunk size": (
            ValueError,
            "chunk_offsets",
            {"cu_seqlens": ple_gdn.Packing(index(0, 40), index(0, 2))},
        ),
        "packing of another count": (
            ValueError,
            "chunk_offsets",
            {"cu_seqlens": ple_gdn.Packing(index(0, 40), index(0, 1, 2))},
        ),
        "save_mode": (ValueError, "save_mode: expected 'light' or 'full', got 'ful'", {"save_mode": "ful"}),
        "reuse": (
            ValueError,
            "reuse_recompute_tapes: expected True, False or 'auto'",
            {"reuse_recompute_tapes": "yes"},
        ),
        "workspace dtype": (TypeError, "workspace: expected dtype uint8", {"workspace": torch.zeros(1 << 20)}),
        "workspace rank": (
            ValueError,
            "workspace: expected 1 dimensions",
            {"workspace": torch.zeros(2, 8, dtype=torch.uint8)},
        ),
        "workspace stride": (
            ValueError,
            "workspace: expected a contiguous",
            {"workspace": torch.zeros(1 << 25, dtype=torch.uint8)[::2]},
        ),
        "workspace size": (
            ValueError,
            "workspace: expected at least",
            {"workspace": torch.empty(9, dtype=torch.uint8)},
        ),
        "cp": (TypeError, "cp: expected a KcpContext from build_kcp_context", {"cp": object()}),
        "misspelt": (TypeError, "use_l2norm", {"use_l2norm": True}),
        "scale type": (TypeError, "scale: expected a number, got str", {"scale": "1"}),
        "flag type": (TypeError, "use_qk_l2norm: expected True or False, got str", {"use_qk_l2norm": "yes"}),
        "not a tensor": (TypeError, "q: expected a torch.Tensor, got list", {"q": [1.0]}),
    }


@pytest.mark.parametrize("name", _bad_inputs())
def test_bad_input_raises_naming_the_argument(name: str) -> None:
    error, message, change = _bad_inputs()[name]
    arguments = dict(zip(("q", "k", "v", "g", "beta"), make_case((40,))[:5], strict=True)) | change
    with pytest.raises(error, match=message):
        ple_gdn.gated_delta_rule(**arguments)


def test_the_raw_op_names_its_modes() -> None:
    inputs = make_case((5,))[:5]
    with pytest.raises(ValueError, match="save_mode: expected one of 'none', 'light', 'full', got 'half'"):
        OP(*inputs, save_mode="half")
    with pytest.raises(ValueError, match="reuse_recompute_tapes: expected one of 'hand_off', 'replay', 'auto'"):
        OP(*inputs, reuse_recompute_tapes="yes")


def test_a_tape_of_another_shape_is_refused() -> None:
    case = make_case((70,))
    tapes = list(OP(*case[:5])[2:])
    tapes[3] = tapes[3][:, :69]
    with pytest.raises(ValueError, match="x: expected shape"):
        BACKWARD(case.do, None, *case[:5], None, None, None, None, *tapes)


def test_no_document_and_no_token_are_plain_cases() -> None:
    case = make_case((40,))
    o, final_state = ple_gdn.gated_delta_rule(*case[:5], output_final_state=True, cu_seqlens=torch.tensor([0]))
    assert not o.any()
    assert final_state.shape == (0, 4, 16, 32)
    empty = make_case((0, 0))
    actual = run_front(empty)
    assert torch.equal(actual["final_state"], empty.initial_state)
    assert torch.equal(actual["dinitial_state"], empty.dfinal_state)
