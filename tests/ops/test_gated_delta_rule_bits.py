"""Gated delta rule: what must agree to the last bit, what is saved, and what is never read."""

from __future__ import annotations

import pytest
import torch
from oracles.gdn import NAMES, Case, assert_same_bits, make_case, run_front
from torch.utils.checkpoint import checkpoint

import ple_gdn

pytestmark = pytest.mark.usefixtures("one_thread")

RAGGED = (130, 0, 1, 64, 65, 63, 7)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def without_saved(case: Case) -> dict[str, torch.Tensor]:
    """The raw ops with every tape missing."""
    boundaries = torch.tensor(case.boundaries)
    leaves = [x.clone().requires_grad_() for x in case[:6]]
    o, final_state, *_ = torch.ops.ple_gdn.gated_delta_rule(
        *leaves, boundaries, output_final_state=True, use_qk_l2norm=True, save_mode="none"
    )
    grads = torch.autograd.grad((o, final_state), leaves, (case.do, case.dfinal_state))
    return dict(zip(NAMES, (o.detach(), final_state.detach(), *grads), strict=True))


@DTYPES
def test_kept_and_rebuilt_tapes_give_the_same_bits(dtype: torch.dtype) -> None:
    case = make_case(RAGGED, dtype=dtype, trailing=3)
    light = run_front(case, save_mode="light")
    assert_same_bits(run_front(case, save_mode="full"), light)
    assert_same_bits(without_saved(case), light)
    assert_same_bits(run_front(case, save_mode="light"), light)


@pytest.mark.parametrize("missing", range(6))
def test_any_single_missing_tape_is_rebuilt_with_the_same_bits(missing: int) -> None:
    case = make_case((70, 3), dtype=torch.bfloat16)
    boundaries = torch.tensor(case.boundaries)
    _, _, *tapes = torch.ops.ple_gdn.gated_delta_rule(*case[:6], boundaries, use_qk_l2norm=True, save_mode="full")

    def gradients(tapes: list[torch.Tensor]) -> list[torch.Tensor]:
        return torch.ops.ple_gdn.gated_delta_rule_backward(
            case.do, case.dfinal_state, *case[:6], boundaries, None, None, *tapes, use_qk_l2norm=True
        )

    some = [case.q.new_empty(0) if at == missing else tape for at, tape in enumerate(tapes)]
    assert all(torch.equal(a, b) for a, b in zip(gradients(tapes), gradients(some), strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@DTYPES
def test_a_packed_document_equals_the_document_alone(dtype: torch.dtype, threads: int) -> None:
    case = make_case(RAGGED, dtype=dtype, key_width=48)
    one_thread = run_front(case)
    torch.set_num_threads(threads)
    packed = run_front(case)
    assert_same_bits(packed, one_thread)
    for n, (start, end) in enumerate(zip(case.boundaries, case.boundaries[1:], strict=False)):
        rows, state = slice(start, end), slice(n, n + 1)
        alone = run_front(
            Case(
                *(x[:, rows] for x in case[:5]),
                case.initial_state[state],
                (0, end - start),
                case.do[:, rows],
                case.dfinal_state[state],
            ),
            packed=False,
        )
        for name in NAMES:
            part = packed[name][state] if name in ("final_state", "dinitial_state") else packed[name][:, rows]
            assert torch.equal(part, alone[name]), (n, name)


def test_boundary_dtype_stride_and_preparation_change_no_bit() -> None:
    case = make_case((5, 4))
    expected = run_front(case)
    strided = torch.tensor([0, -1, 5, -1, 9, -1], dtype=torch.int32)[::2]
    for boundaries in (torch.tensor([0, 5, 9], dtype=torch.int32), strided, ple_gdn.prepare_varlen(strided)):
        assert_same_bits(run_front(case, cu_seqlens=boundaries), expected)


def test_rows_of_no_document_and_their_nan_touch_nothing() -> None:
    case = make_case((70, 3), trailing=2)
    expected = run_front(case)
    poison = lambda x: torch.cat([x[:, :73], torch.full_like(x[:, 73:], float("nan"))], 1)  # noqa: E731
    actual = run_front(Case(*(poison(x) for x in case[:5]), *case[5:7], poison(case.do), case.dfinal_state))
    assert_same_bits(actual, expected)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not actual[name][:, 73:].any()


def test_nan_in_one_document_stays_there() -> None:
    case = make_case((70, 66))
    v = case.v.clone()
    v[:, 3] = float("nan")
    actual, expected = run_front(case._replace(v=v)), run_front(case)
    assert actual["o"][:, :70].isnan().any()
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(actual[name][:, 70:], expected[name][:, 70:])


def test_layout_of_inputs_and_gradients_changes_no_bit() -> None:
    case = make_case((70, 3))
    expected = run_front(case._replace(do=torch.ones_like(case.do)))
    fused = torch.cat([case.q.flatten(2), case.k.flatten(2), case.v.flatten(2)], -1).requires_grad_()
    q, k, v = fused.split([32, 32, 128], -1)
    g = torch.stack([case.g, case.g], -1).requires_grad_()
    beta = case.beta.mT.contiguous().mT.clone(memory_format=torch.preserve_format).requires_grad_()
    state = case.initial_state.mT.contiguous().mT.requires_grad_()
    o, final_state = ple_gdn.gated_delta_rule(
        q.unflatten(-1, (2, 16)),
        k.unflatten(-1, (2, 16)),
        v.unflatten(-1, (4, 32)),
        g[..., 0],
        beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm=True,
        cu_seqlens=torch.tensor(case.boundaries),
    )
    ones = torch.ones(()).expand_as(o)
    dfused, dg, dbeta, dstate = torch.autograd.grad(
        (o, final_state), (fused, g, beta, state), (ones, case.dfinal_state)
    )
    assert torch.equal(o, expected["o"])
    assert torch.equal(dfused, torch.cat([expected[n].flatten(2) for n in ("dq", "dk", "dv")], -1))
    assert torch.equal(dg[..., 0], expected["dg"])
    assert torch.equal(dbeta, expected["dbeta"])
    assert torch.equal(dstate, expected["dinitial_state"])


def test_reduced_precision_beta_is_used_as_given() -> None:
    case = make_case((70,), dtype=torch.bfloat16)
    beta = case.beta.bfloat16()
    low, wide = run_front(case._replace(beta=beta)), run_front(case._replace(beta=beta.float()))
    assert low["dbeta"].dtype == torch.bfloat16
    assert torch.equal(low["dbeta"], wide["dbeta"].bfloat16())
    assert torch.equal(low["o"], wide["o"])


@pytest.mark.parametrize("reuse", [True, False, "auto"])
@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_a_checkpoint_region_gives_the_same_bits(reuse: bool | str, save_mode: str) -> None:
    case = make_case((70, 3), dtype=torch.bfloat16)
    expected = run_front(case)
    leaves = [x.clone().requires_grad_() for x in case[:6]]

    def region(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ple_gdn.gated_delta_rule(
            *tensors[:5],
            initial_state=tensors[5],
            output_final_state=True,
            use_qk_l2norm=True,
            cu_seqlens=torch.tensor(case.boundaries),
            save_mode=save_mode,
            reuse_recompute_tapes=reuse,
        )

    outputs = checkpoint(region, *leaves, use_reentrant=False)
    grads = torch.autograd.grad(outputs, leaves, (case.do, case.dfinal_state))
    assert_same_bits(dict(zip(NAMES, (*outputs, *grads), strict=True)), expected)


@pytest.mark.parametrize("save_mode", ["light", "full"])
@pytest.mark.parametrize("packed", [True, False])
def test_saved_bytes_are_the_inputs_and_the_tapes_of_the_mode(save_mode: str, packed: bool) -> None:
    tokens, documents = 139, 3 if packed else 1
    case = make_case((70, 0, 69) if packed else (tokens,), dtype=torch.bfloat16)
    leaves = [x.clone().requires_grad_() for x in case[:6]]
    known = {x.data_ptr() for x in leaves}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.data_ptr() not in known:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    boundaries = torch.tensor(case.boundaries) if packed else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ple_gdn.gated_delta_rule(*leaves[:5], initial_state=leaves[5], cu_seqlens=boundaries, save_mode=save_mode)
    light = tokens * (4 * 4 + 4 * 2 + 4 * 2 + 2 * 4 * 64)
    chunks = tokens // 64 + documents if packed else -(-tokens // 64)
    full = 2 * chunks * 4 * 16 * 32 + 2 * tokens * 4 * 32
    start_state = 4 * 4 * 16 * 32
    assert sum(saved.values()) == light + (full if save_mode == "full" else start_state)


def test_nothing_is_saved_or_made_without_a_gradient() -> None:
    case = make_case((70,))
    with torch.no_grad():
        o, _ = ple_gdn.gated_delta_rule(*(x.requires_grad_() for x in case[:5]))
    assert not o.requires_grad
    tapes = torch.ops.ple_gdn.gated_delta_rule(*(x.detach() for x in case[:5]), save_mode="none")[2:]
    assert all(tape.numel() == 0 for tape in tapes)


@pytest.mark.parametrize("prepared", [True, False])
def test_four_layers_read_the_host_at_most_once(prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case((33, 41, 2, prepared + 1))
    boundaries = torch.tensor(case.boundaries)
    packing = ple_gdn.prepare_varlen(boundaries) if prepared else boundaries
    reads: list[str] = []
    for name in ("item", "tolist", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def count(tensor: torch.Tensor, *args: object, _name: str = name, _original=original) -> object:
            reads.append(_name)
            return _original(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, count)
    for _ in range(4):
        run_front(case, cu_seqlens=packing)
    assert len(reads) <= (0 if prepared else 1)


def test_saved_state_grows_by_chunk_and_not_by_token() -> None:
    def saved(tokens: int) -> int:
        return sum(
            t.numel() for t in torch.ops.ple_gdn.gated_delta_rule(*make_case((tokens,))[:5], save_mode="full")[2:]
        )

    assert saved(1024) == 2 * saved(512) == 4 * saved(256)
