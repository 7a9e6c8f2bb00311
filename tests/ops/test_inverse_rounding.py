"""Rounding of X where a chunk's keys point one way: errors are carried, and do not add up in the state."""

from __future__ import annotations

import pytest
import torch
from oracles.gdn import NAMES, make_case, oracle, relative_rms, run_front

from ple_gdn.ops.gated_delta_rule import inverse_rounding
from ple_gdn.ops.gated_delta_rule.chunk_math import inverse_core
from ple_gdn.ops.gated_delta_rule.inverse_rounding import alike, round_carrying, rounded_core

pytestmark = pytest.mark.usefixtures("one_thread")

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place, relative, at the most


def keys(noise: float, width: int = 64, heads: int = 1, rows: int = 64) -> torch.Tensor:
    """`[1, heads, 64, width]` of norm 1 about one direction; rows past `rows` are 0, as those of no token."""
    common, own = torch.randn(1, heads, 1, width), torch.randn(1, heads, 64, width)
    k = torch.nn.functional.normalize(common + noise * own, dim=-1)
    return k * (torch.arange(64) < rows)[:, None]


@pytest.mark.parametrize(("norm", "beta", "budget", "before"), [(0.9, 1.0, 7e-3, 7.5e-3), (0.99, 2.0, 16e-3, 25e-3)])
def test_equal_keys_of_norm_below_one_gather_no_error(
    norm: float, beta: float, budget: float, before: float, monkeypatch
) -> None:
    case = make_case((129,), heads=1, value_heads=2, key_width=64, mode="equal_keys", dtype=torch.bfloat16)
    k = norm * torch.nn.functional.normalize(case.k.double(), dim=-1)
    case = case._replace(k=k.bfloat16(), beta=torch.full_like(case.beta, beta))
    expected = oracle(case, 0.125, False)
    found = run_front(case, use_qk_l2norm=False)
    for name in NAMES:
        assert relative_rms(found[name], expected[name]) <= budget, name
    monkeypatch.setattr(inverse_rounding, "alike", lambda pairs: torch.zeros(pairs.shape[:2], dtype=torch.bool))
    assert relative_rms(run_front(case, use_qk_l2norm=False)["o"], expected["o"]) > before


def state_error(k: torch.Tensor, beta: torch.Tensor, x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """What the errors of each of X's columns add to a state: norms of sum_i beta_i k_i e_ij `[64]`."""
    weighted = (k * beta[..., None]).double()
    return (weighted[0, 0].mT @ (x[0, 0].double() - exact[0, 0])).norm(dim=0)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("strength", ["one", "two", "uniform"])
def test_errors_of_a_column_add_up_to_that_of_one_number(strength: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k = keys(0.1)
    beta = {"one": torch.ones(1, 1, 64), "two": torch.full((1, 1, 64), 2.0), "uniform": 0.2 + torch.rand(1, 1, 64)}
    beta = beta[strength]
    exact = inverse_core((k @ k.mT).double(), beta.double())
    carried, plain = rounded_core(k, beta, dtype), inverse_core(k @ k.mT, beta).to(dtype)
    # The last row has none below to make up for it.
    total, before = (state_error(k, beta, x, exact)[:-8].square().mean().sqrt() for x in (carried, plain))
    assert total < before / 4
    assert not torch.equal(carried, plain)
    # No number is off by more than three errors, its own and twice that above.
    largest = torch.nn.functional.max_pool2d(exact.abs().float(), (3, 1), 1, (1, 0)).double()
    assert ((carried.double() - exact).abs() <= 3 * UNIT[dtype] * largest + 1e-6).all()
    assert (carried.double().triu() == 0).all()


def test_what_is_carried_is_worth_what_the_row_below_adds() -> None:
    x = torch.zeros(1, 64, 64)
    x[0, 1:4, 0] = torch.tensor([1 + 2.0**-9, 0.5, 0.25])  # off by 2^-9, exact, exact
    pairs, beta = torch.ones(1, 64, 64), torch.ones(1, 64)
    pairs[0, 2, 1] = pairs[0, 1, 2] = -0.5
    beta[0, 2] = 4.0
    rounded = round_carrying(x, pairs, beta, torch.bfloat16).double()
    assert rounded[0, 1, 0] == 1.0
    assert rounded[0, 2, 0] == 0.5  # takes over -0.5 / 4 of 2^-9, an eighth of its unit, and passes it on
    beta[0, 2] = 1e-30  # cannot make up: at most twice
    assert round_carrying(x, pairs, beta, torch.bfloat16)[0, 2, 0] == 0.5 - 2 * 2.0**-9


def test_chunks_of_other_keys_are_rounded_number_by_number() -> None:
    torch.manual_seed(0)
    beta = torch.rand(2, 4, 64)
    k = torch.cat((keys(0.05, heads=2), torch.nn.functional.normalize(torch.randn(1, 2, 64, 64), dim=-1)))
    exact = inverse_core(k @ k.mT, beta)
    rounded = rounded_core(k, beta, torch.bfloat16)
    assert torch.equal(rounded[1], exact[1].bfloat16())
    assert not torch.equal(rounded[0], exact[0].bfloat16())
    # A chunk's bits are its own, whatever chunks are beside it.
    assert torch.equal(rounded[:1], rounded_core(k[:1], beta[:1], torch.bfloat16))
    assert torch.equal(rounded_core(k, beta, torch.float32), exact)


@pytest.mark.parametrize("rows", [64, 17, 2])
def test_half_a_cosine_parts_keys_of_one_direction_from_others(rows: int) -> None:
    """Also against it, short chunks, and keys of any norm."""
    axis = torch.zeros(64, 128)
    for cosine, expected in ((0.47, False), (0.53, True)):
        # One common part and one of its own: any two have the cosine `cosine`.
        k = axis.clone()
        k[:, 0] = cosine**0.5
        k[torch.arange(64), 1 + torch.arange(64)] = (1 - cosine) ** 0.5
        k *= torch.where(torch.arange(64) % 3 == 0, -7.0, 0.4)[:, None]
        k[rows:] = 0
        assert alike((k @ k.T)[None, None]).item() is expected
    one = torch.zeros(64, 128)
    one[0] = 1.0
    assert not alike((one @ one.T)[None, None]).item()
    assert not alike(torch.zeros(1, 1, 64, 64)).item()


@pytest.mark.parametrize("noise", [0.05, 0.02])
def test_nearly_equal_keys_meet_the_budget_and_would_not_without(noise: float, monkeypatch) -> None:
    case = make_case((200, 65), value_heads=6, key_width=128, mode="equal_keys", dtype=torch.bfloat16)
    k = torch.nn.functional.normalize(case.k.double(), dim=-1) * 128**0.5
    case = case._replace(k=(k + noise * torch.randn(k.shape, generator=torch.Generator().manual_seed(0))).bfloat16())
    expected = oracle(case, 128**-0.5, True)
    found = run_front(case)
    for name in NAMES:
        assert relative_rms(found[name], expected[name]) <= (8e-3 if name in ("dg", "dbeta") else 7e-3), name
    monkeypatch.setattr(inverse_rounding, "alike", lambda pairs: torch.zeros(pairs.shape[:2], dtype=torch.bool))
    assert relative_rms(run_front(case)["dbeta"], expected["dbeta"]) > 8e-3


def test_later_keys_of_a_chunk_change_earlier_rows_by_their_rounding_at_the_most() -> None:
    """A chunk is rounded one way or the other as a whole: README gives the figure."""
    case = make_case((64,), heads=1, value_heads=2, key_width=64, mode="nearer_equal_keys", dtype=torch.bfloat16)
    other = case.k.clone()
    other[:, 40:] = torch.randn(other[:, 40:].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    o, changed = (run_front(c)["o"][:, :40].double() for c in (case, case._replace(k=other)))
    assert 0 < (changed - o).norm() / o.norm() < 3e-3
