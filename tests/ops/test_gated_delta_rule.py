"""Gated delta rule: values and gradients against the float64 token recurrence."""

from __future__ import annotations

import time

import pytest
import torch
from oracles.gdn import NAMES, Case, make_case, oracle, relative_rms, run_front, token_recurrence
from oracles.gdn_dense import gated_delta_rule_dense

import ple_gdn

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = (
    *("plain", "no_decay", "strong_decay", "mixed_decay", "one_reset", "beta_one", "beta_two", "beta_zero"),
    *("equal_keys", "nearer_equal_keys", "near_equal_keys", "zero_keys", "orthogonal_query", "large_state"),
)
RAGGED = (70, 0, 1, 64, 65, 63, 7)
BENIGN = ("plain", "strong_decay", "mixed_decay", "beta_zero", "zero_keys", "orthogonal_query", "large_state")
# Relative root mean square: (o, dq, dk, dv and states; dg and dbeta). bfloat16 from the design's error table.
BUDGETS = {
    (torch.float64, True): (1e-12, 1e-12),
    (torch.float64, False): (1e-12, 1e-12),
    (torch.float32, True): (1e-5, 1e-5),
    (torch.float32, False): (1e-5, 1e-5),
    (torch.bfloat16, True): (4e-3, 5e-3),
    (torch.bfloat16, False): (7e-3, 8e-3),
    (torch.float16, True): (2e-3, 2e-3),
    (torch.float16, False): (2e-3, 2e-3),
}


def assert_within_budget(case: Case, *, benign: bool = True, use_qk_l2norm: bool = True, **options: object) -> None:
    scale = options.get("scale", case.q.shape[-1] ** -0.5)
    expected = oracle(case, scale, use_qk_l2norm)
    actual = run_front(case, use_qk_l2norm=use_qk_l2norm, **options)
    wide, gates = BUDGETS[case.q.dtype, benign]
    for name in NAMES:
        assert actual[name].shape == expected[name].shape
        error = relative_rms(actual[name], expected[name])
        assert error <= (gates if name in ("dg", "dbeta") else wide), f"{name}: {error:.2e}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ragged_packs_equal_the_token_recurrence(mode: str, dtype: torch.dtype) -> None:
    assert_within_budget(make_case(RAGGED, mode=mode, dtype=dtype, trailing=3), benign=mode in BENIGN)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["fp64", "fp16"])
def test_double_and_half_precision_equal_the_token_recurrence(dtype: torch.dtype) -> None:
    assert_within_budget(make_case(RAGGED, dtype=dtype))


@pytest.mark.parametrize("value_heads", [1, 2, 3, 4, 8])
def test_value_heads_read_their_group_key_head(value_heads: int) -> None:
    heads = 2 if value_heads in (2, 4, 8) else 1
    case = make_case((70, 20), heads=heads, value_heads=value_heads)
    scales = torch.tensor([0.1, 1.0])[:heads, None]
    assert_within_budget(case._replace(q=case.q * scales, k=case.k * scales), scale=1.0)


@pytest.mark.parametrize(("key_width", "value_width"), [(16, 48), (48, 16), (80, 96), (128, 64), (192, 256), (256, 16)])
def test_key_and_value_widths_are_independent(key_width: int, value_width: int) -> None:
    case = make_case((66,), heads=1, value_heads=2, key_width=key_width, value_width=value_width)
    assert_within_budget(case, scale=None or key_width**-0.5)


def test_keys_of_norm_below_one_need_no_norm_in_the_op() -> None:
    case = make_case(RAGGED)
    keys = torch.nn.functional.normalize(case.k, dim=-1) * 0.9
    assert_within_budget(case._replace(k=keys), use_qk_l2norm=False)


@pytest.mark.parametrize("scale", [1.0, -0.5, 0.0])
def test_any_scale_is_used_as_given(scale: float) -> None:
    case = make_case((66,))
    expected, actual = oracle(case, scale, True), run_front(case, scale=scale)
    for name in NAMES:
        torch.testing.assert_close(actual[name].double(), expected[name], atol=2e-5, rtol=1e-5)


def test_batch_rows_are_documents_of_their_own() -> None:
    rows = [make_case((70,), seed=seed) for seed in (1, 2, 3)]
    batch = Case(
        *(torch.cat(x) for x in list(zip(*rows, strict=True))[:6]),
        (0, 70),
        *(torch.cat([getattr(r, n) for r in rows]) for n in ("do", "dfinal_state")),
    )
    actual = run_front(batch, packed=False)
    for at, row in enumerate(rows):
        for name, expected in oracle(row, 16**-0.5, True).items():
            assert relative_rms(actual[name][at : at + 1], expected) <= 1e-5, name


def test_absent_states_are_zero_and_none() -> None:
    case = make_case((70, 5))
    zero = case._replace(
        initial_state=torch.zeros_like(case.initial_state), dfinal_state=torch.zeros_like(case.dfinal_state)
    )
    expected = oracle(zero, 16**-0.5, True)
    leaves = [x.clone().requires_grad_() for x in case[:5]]
    o, final_state = ple_gdn.gated_delta_rule(*leaves, use_qk_l2norm=True, cu_seqlens=torch.tensor(case.boundaries))
    assert final_state is None
    for name, grad in zip(NAMES[2:7], torch.autograd.grad(o, leaves, case.do), strict=True):
        assert relative_rms(grad, expected[name]) <= 1e-5, name


def test_a_loss_on_the_final_state_alone_reaches_every_input_but_q() -> None:
    case = make_case((70, 5))
    expected = oracle(case._replace(do=torch.zeros_like(case.do)), 16**-0.5, True)
    leaves = [x.clone().requires_grad_() for x in case[:6]]
    _, final_state = ple_gdn.gated_delta_rule(
        *leaves[:5],
        initial_state=leaves[5],
        output_final_state=True,
        use_qk_l2norm=True,
        cu_seqlens=torch.tensor(case.boundaries),
    )
    for name, grad in zip(NAMES[2:], torch.autograd.grad(final_state, leaves, case.dfinal_state), strict=True):
        assert relative_rms(grad, expected[name]) <= 1e-5, name


@pytest.mark.parametrize("key", [1e-4, 0.0])
def test_tiny_and_zero_rows_are_normalised_with_eps_inside_the_root(key: float) -> None:
    case = make_case((3,), heads=1, value_heads=1)
    case = case._replace(k=torch.full_like(case.k, key), q=torch.full_like(case.q, key))
    actual = run_front(case)
    for name, expected in oracle(case, 0.25, True).items():
        assert actual[name].isfinite().all()
        torch.testing.assert_close(actual[name].double(), expected, atol=1e-6, rtol=1e-4)


def test_legal_decays_stay_finite_and_a_reset_forgets_exactly() -> None:
    case = make_case((64,))
    for g in (torch.full_like(case.g, -2.0), torch.full_like(case.g, -200.0), torch.full_like(case.g, float("-inf"))):
        assert all(tensor.isfinite().all() for tensor in run_front(case._replace(g=g)).values())


def test_a_gradient_behind_strong_decay_keeps_its_own_precision() -> None:
    case = make_case((130,), mode="strong_decay")
    expected, actual = oracle(case, 0.25, True), run_front(case)
    assert 0 < expected["dg"].abs().max() < 1e-20
    assert relative_rms(actual["dg"] * 1e20, expected["dg"] * 1e20) <= 1e-5


def test_the_last_rows_of_65537_equal_the_same_rows_alone() -> None:
    case = make_case((65537,), heads=1, value_heads=1, value_width=16)

    def run(rows: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ple_gdn.gated_delta_rule(
            *(x[:, rows] for x in case[:5]), initial_state=state, output_final_state=True, use_qk_l2norm=True
        )

    whole, final_state = run(slice(None), case.initial_state)
    _, before = run(slice(0, 65472), case.initial_state)
    tail, tail_state = run(slice(65472, None), before)
    assert torch.equal(whole[:, 65472:], tail)
    assert torch.equal(final_state, tail_state)


def test_four_thousand_tokens_train_in_seconds() -> None:
    case = make_case((4096,), key_width=64, value_width=64)
    started = time.process_time()
    run_front(case)
    assert time.process_time() - started < 5


def test_a_thousand_short_documents_train_in_seconds() -> None:
    case = make_case((1,) * 1024)
    started = time.process_time()
    actual = run_front(case)
    assert time.process_time() - started < 5
    expected, _ = token_recurrence(*(x.double() for x in case[:6]), case.boundaries, 0.25, True)
    assert relative_rms(actual["o"], expected) <= 1e-5


@pytest.mark.parametrize(
    ("dtype", "one_chunk"), [(torch.float32, 4e-6), (torch.bfloat16, 25e-3), (torch.float16, 3e-3)]
)
def test_reflections_carry_the_rounding_of_each_chunk_and_no_more(dtype: torch.dtype, one_chunk: float) -> None:
    # beta 2 without decay: I - 2 k k^T is orthogonal, nothing is forgotten, so the errors of chunks add up like a
    # random walk (dinitial_state in bfloat16: 18, 26, 37 times 1e-3 over 1, 2, 4 chunks), all of the 16-bit inverse.
    for chunks in (1, 4, 16):
        case = make_case((64 * chunks,), heads=1, value_heads=2, mode="beta_two", dtype=dtype, seed=chunks)
        case = case._replace(g=torch.zeros_like(case.g))
        leaves = [x.double().requires_grad_() for x in case[:6]]
        outputs = gated_delta_rule_dense(*leaves, case.boundaries, 0.25, True)
        grads = torch.autograd.grad(outputs, leaves, (case.do.double(), case.dfinal_state.double()))
        actual = run_front(case, scale=0.25)
        for name, expected in zip(NAMES, (*outputs, *grads), strict=True):
            error = relative_rms(actual[name], expected.detach())
            assert error <= one_chunk * chunks**0.5, f"{name} after {chunks} chunks: {error:.2e}"


@pytest.mark.slow
def test_a_long_pack_without_decay_stays_within_budget() -> None:
    case = make_case((4096,), heads=1, value_heads=1, mode="no_decay", dtype=torch.bfloat16)
    assert_within_budget(case, benign=False)
