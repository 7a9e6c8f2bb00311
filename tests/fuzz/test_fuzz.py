"""A short slice of each fuzzer, and that they can fail. Long runs: RESULTS.md."""

from __future__ import annotations

import importlib
import multiprocessing
import time
import types
from collections import Counter
from functools import partial
from pathlib import Path

import fuzz_gated_residual
import fuzz_gdn
import fuzz_ple
import fuzz_runs
import pytest
import torch
import toy_fuzzers
from fuzz_runs import run
from harness import GUARD, STRUCTURES, Source, Tally
from oracles.gdn import make_case, token_recurrence
from oracles.gdn_dense import gated_delta_rule_dense
from oracles.gdn_terms import gate_gradient_terms
from oracles.ple import ple_inputs, ple_packed

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FUZZERS = {"gdn": (fuzz_gdn, 320), "ple": (fuzz_ple, 300), "gated_residual": (fuzz_gated_residual, 600)}


@pytest.mark.parametrize("name", FUZZERS)
def test_no_case_is_wrong_and_no_guard_is_touched(name: str) -> None:
    module, cases = FUZZERS[name]
    tally = run(module.fuzz, cases, seed=2026)
    assert tally.failures == []
    assert tally.cases >= cases
    assert tally.compared > 2 * cases


@pytest.mark.parametrize(
    ("name", "where", "call"),
    [
        # Plain eager tensors go past the dispatcher, so the function that chooses is what both ways have in common.
        ("gdn", importlib.import_module("ple_gdn.ops.gated_delta_rule.op"), "_run_backward"),
        ("ple", torch.ops.ple_gdn, "ple_gate_conv_backward"),
        ("gated_residual", torch.ops.ple_gdn, "gated_residual_mix_backward"),
    ],
    ids=["gdn", "ple", "gated_residual"],
)
def test_a_gradient_that_is_five_percent_off_is_seen(
    name: str, where: object, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(where, call)

    def wrong(*args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        first, *others = right(*args, **kwargs)
        return (first * 1.05, *others)

    monkeypatch.setattr(where, call, wrong)
    tally = run(FUZZERS[name][0].fuzz, 40, seed=3)
    assert len(tally.failures) > 3


def test_a_write_outside_a_tensor_or_into_an_input_is_seen() -> None:
    source = Source("guards", 0, 0, device=CPU)
    x = source.guarded("x", torch.zeros(3, 4))
    y = source.guarded("y", torch.zeros(5, dtype=torch.int32), dense=True)
    scratch = source.scratch("scratch", 32)
    assert source.touched() == []
    scratch.fill_(0)
    assert source.touched() == []
    torch.as_strided(y, (1,), (1,), y.storage_offset() - 1).fill_(0)
    x[2, 3] = 1.0
    torch.as_strided(scratch, (1,), (1,), scratch.storage_offset() + 32).fill_(0)
    assert source.touched() == ["x", "y", "scratch"]


def test_on_a_gpu_groups_share_what_selects_kernels_and_nothing_else() -> None:
    gpu = torch.device("cuda")  # choices are made without one
    groups = [Source("any", 1, group, device=gpu) for group in (3, 3 + STRUCTURES, 4)]
    structures = [[source.choice(range(1000), structure=True) for _ in range(4)] for source in groups]
    assert structures[0] == structures[1] != structures[2]
    assert len({source.choice(range(10**9)) for source in groups}) == 3


def test_aligned_tensors_begin_at_multiples_of_the_guard_whatever_their_gaps() -> None:
    source = Source("aligned", 0, 0, device=CPU)
    source.aligned = True
    offsets = [source.guarded("x", torch.zeros(3, 4, 5)).storage_offset() for _ in range(50)]
    assert all(offset % GUARD == 0 for offset in offsets)
    assert source.touched() == []


def test_memory_that_is_not_written_is_nan() -> None:
    seen = []

    def look(tally: Tally, seed: int, group: int, device: torch.device) -> None:
        seen.append(torch.empty(7).isnan().all())
        tally.cases += 1

    run(look, 1, seed=0)
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that begin at once: a spawned one imports torch first, seconds of it."""
    monkeypatch.setattr(fuzz_runs, "get_context", lambda method: multiprocessing.get_context("fork"))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("forked")
def test_quick_workers_go_on_until_a_slow_one_has_ended_its_first_group(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        fuzz_runs.main(toy_fuzzers.first_group_is_slow, ["--workers", "2", "--cases", "3"])
    assert ended.value.code == 0
    assert "worst error / allowed: toy 0.99" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("forked")
def test_quick_workers_make_up_for_one_that_compiles_and_every_group_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    log = tmp_path / "log"
    with pytest.raises(SystemExit) as ended:
        fuzz_runs.main(toy_fuzzers.even_groups_hang, ["--workers", "2", "--cases", "12", "--log", str(log)])
    assert ended.value.code == 0
    done = [int(line.split("group ")[1].split(",")[0]) for line in log.read_text().splitlines()]
    assert len(done) >= 12  # more where the first worker begins late
    assert f" {len(done)} cases, seed 0" in capsys.readouterr().out.splitlines()[-1]
    assert sorted(set(done) - {0}) == list(range(1, 2 * len(set(done) - {0}), 2))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("forked")
def test_at_the_deadline_what_is_done_is_told_and_no_worker_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    told, began = [], time.monotonic()
    clock = lambda: time.monotonic() + 1e4 * (len(told) >= 3)  # noqa: E731
    monkeypatch.setattr(fuzz_runs, "time", types.SimpleNamespace(monotonic=clock, process_time=time.process_time))
    monkeypatch.setattr(fuzz_runs, "_log", lambda file, began: lambda group, part: told.append(group))
    arguments = ["--workers", "2", "--cases", "1000", "--seconds", "500", "--log", "/dev/null"]
    with pytest.raises(SystemExit) as ended:
        fuzz_runs.main(toy_fuzzers.even_groups_hang, arguments)
    assert time.monotonic() - began < 100
    assert ended.value.code == 2
    assert f"{len(told)} cases of 1000" in capsys.readouterr().out.splitlines()[-1]


def test_a_worker_that_ends_is_a_failure_with_its_traceback(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        fuzz_runs.main(toy_fuzzers.worker_ends, ["--workers", "2", "--cases", "100"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "seed 0 group 2: worker 0 ended: Traceback" in out
    assert "ValueError: toy error" in out
    assert "seed 0 group 3: worker 1 ended: no word, exit code 7" in out
    assert "2 cases of 100" in out


def test_a_structure_without_a_finished_group_is_warned_of() -> None:
    counts = Counter({at: 10 * at for at in range(STRUCTURES)})
    counts[5] = 0
    cases, warning = fuzz_runs.structure_lines(counts)
    assert cases.startswith("cases by structure: 0 to 150, median 75: 0 10 20 30 40 0 60")
    assert warning == "WARNING: no group of 2 of 16 structures was finished: 0, 5"
    assert len(fuzz_runs.structure_lines(Counter(dict.fromkeys(range(STRUCTURES), 1)))) == 1


@pytest.mark.parametrize(("ended", "judged"), [(5, 0), (9, 9)])
def test_a_group_that_the_time_cuts_is_judged_if_half_of_it_is_there(ended: int, judged: int) -> None:
    class Cut(Tally):
        def late(self) -> bool:
            self.asked = getattr(self, "asked", -1) + 1
            return self.asked >= ended

    tally = Cut()
    fuzz_gdn.fuzz(tally, 2026, 1, CPU)
    assert (tally.cases, tally.kinds.total()) == (judged, judged)
    assert (tally.compared > 0) == (tally.guards > 0) == (judged > 0)
    assert tally.failures == []


def test_the_structures_of_a_gpu_hold_every_value_of_every_choice() -> None:
    for seed in range(20):
        found = fuzz_gdn.structures(seed)
        assert len(found) == STRUCTURES
        assert found == fuzz_gdn.structures(seed)
        values = {name: {getattr(s, name) for s in found} for name in fuzz_gdn.Structure._fields}
        assert values["dtype"] == {torch.float32, torch.bfloat16, torch.float16}
        assert values["key_width"] == values["value_width"] == set(fuzz_gdn.WIDTHS)
        assert {(s.heads, s.ratio) for s in found} == set(fuzz_gdn.HEADS)
        # Packed or not, normalised or not: all four where the kernels of models run.
        models = [s for s in found if (s.dtype, s.key_width, s.value_width) == (torch.bfloat16, 128, 128)]
        assert len({(s.packed, s.use_qk_l2norm) for s in models}) == 4
        for dtype in (torch.bfloat16, torch.float16):
            assert {s.narrow_beta for s in found if s.dtype == dtype} == {True, False}
        packed = [s for s in found if s.packed]
        pairs = {(dtype, aligned) for dtype in (torch.int32, torch.int64) for aligned in (True, False)}
        assert {(s.index_dtype, s.aligned) for s in packed} == pairs
        assert {s.prepared for s in packed if s.index_dtype == torch.int64} == {True, False}
    assert fuzz_gdn.structures(0) != fuzz_gdn.structures(1)


@pytest.mark.parametrize("use_qk_l2norm", [True, False])
def test_the_dense_oracle_is_the_token_recurrence(use_qk_l2norm: bool) -> None:
    for seed, mode in enumerate(("plain", "mixed_decay", "one_reset", "beta_two", "zero_keys")):
        case = make_case((20, 0, 1, 66), mode=mode, dtype=torch.float64, seed=seed, trailing=2)
        k = torch.nn.functional.normalize(case.k, dim=-1)
        results = []
        by_chunks = partial(gated_delta_rule_dense, inverse_dtype=torch.float64)
        for oracle in (token_recurrence, gated_delta_rule_dense, by_chunks):
            leaves = [x.detach().clone().requires_grad_() for x in case._replace(k=k)[:6]]
            outputs = oracle(*leaves, case.boundaries, 0.3, use_qk_l2norm)
            grads = torch.autograd.grad(outputs, leaves, (case.do, case.dfinal_state))
            results.append((*outputs, *grads))
        for ours, theirs, chunked in zip(*results, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(chunked, ours, rtol=1e-9, atol=1e-9)
        upstream = (case.do, case.dfinal_state)
        sums, _ = gate_gradient_terms(*case._replace(k=k)[:7], 0.3, use_qk_l2norm, *upstream)
        torch.testing.assert_close(sums, torch.stack(results[0][5:7]), rtol=1e-9, atol=1e-9)


def test_one_term_is_the_whole_of_an_inner_product() -> None:
    case = make_case((20, 0, 7), key_width=1, value_width=1, dtype=torch.float64)
    sums, roots = gate_gradient_terms(*case[:7], 0.3, True, case.do, case.dfinal_state)
    torch.testing.assert_close(roots, sums.abs())
    assert (roots > 0).any()


def test_a_gate_gradient_whose_terms_cancel_is_held_to_their_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_case((12,), heads=1, value_heads=1, key_width=64, value_width=64, dtype=torch.float16, seed=3)
    state = 30 * inputs.initial_state
    # With beta 0 the state does nothing but decay: every dg is the decayed <state, dstate>, 1/200 of its terms here.
    dstate = inputs.dfinal_state
    dstate -= state * ((state * dstate).sum() / (state * state).sum())
    dstate += state * (5e-3 * (state * dstate).norm() / (state * state).sum())
    given = {**dict(zip(fuzz_gdn.INPUTS, inputs[:5], strict=False)), "initial_state": state}
    given["beta"] = torch.zeros_like(given["beta"])
    leaves = {n: x.double() for n, x in given.items()}
    given["g"].requires_grad_(), leaves["g"].requires_grad_()
    options = {"scale": None, "output_final_state": True, "use_qk_l2norm": True}
    case = fuzz_gdn.Case(None, "cancelling", given, leaves, options, None, None, ["g"], False, True)
    actual, upstream = fuzz_gdn._call(case, given, [dstate])
    expected = fuzz_gdn._expected(case, upstream)

    def judged(off: float) -> list[str]:
        tally = Tally()
        found = {**actual, "dg": actual["dg"] + off * (state * dstate).norm()}
        fuzz_gdn._judge(tally, case, found, expected, {}, upstream)
        return [failure.what for failure in tally.failures]

    assert judged(0.0) == []
    assert judged(0.01) == ["dg"]
    monkeypatch.setattr(fuzz_gdn, "ROUNDINGS", {})
    assert judged(0.0) == ["dg"]


def test_products_of_three_tf32_ones_leave_five_times_the_error_where_terms_cancel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Found on an H200: keys nearly alike, no decay, beta 0 or .7; dg is a sum over tokens of terms that cancel.
    group = 550
    structure = fuzz_gdn.structures(1)[group % STRUCTURES]
    sizes = fuzz_gdn._sizes(Source("gdn", 1, group, device=CPU), structure)
    case = fuzz_gdn._make(Source("gdn", 1, group, 9, device=CPU), "alike", sizes, structure)
    multiply = torch.Tensor.__matmul__

    def cut(x: torch.Tensor) -> torch.Tensor:
        return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    def in_three(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype != torch.float32:
            return multiply(a, b)
        (a, a_left), (b, b_left) = ((cut(x), cut(x - cut(x))) for x in (a, b))
        return multiply(a, b) + (multiply(a, b_left) + multiply(a_left, b))

    def judged(left: float) -> list[str]:
        tally = Tally()
        monkeypatch.setitem(fuzz_gdn.BESIDE_FLOAT32, "cpu", left)
        fuzz_gdn._judge(tally, case, actual, fuzz_gdn._expected(case, upstream), {}, upstream)
        return [failure.what for failure in tally.failures]

    actual, upstream = fuzz_gdn._call(case, case.given, None)
    assert judged(fuzz_gdn.BESIDE_FLOAT32["cpu"]) == []
    monkeypatch.setattr(torch.Tensor, "__matmul__", in_three)
    actual, _ = fuzz_gdn._call(case, case.given, upstream)
    monkeypatch.undo()
    assert judged(fuzz_gdn.BESIDE_FLOAT32["cpu"]) == ["dg"]
    assert judged(fuzz_gdn.BESIDE_FLOAT32["cuda"]) == []


def test_what_decays_below_the_smallest_float16_may_be_lost_from_the_gradient_of_a_state() -> None:
    def judged(g: float, dtype: torch.dtype, left: float) -> list[str]:
        inputs = make_case((20,), heads=1, value_heads=1, key_width=16, value_width=16, dtype=dtype, seed=3)
        given = dict(zip(fuzz_gdn.INPUTS, inputs[:6], strict=True))
        given["g"] = torch.full_like(given["g"], g)
        leaves = {n: x.double() for n, x in given.items()}
        given["initial_state"].requires_grad_(), leaves["initial_state"].requires_grad_()
        options = {"scale": None, "output_final_state": False, "use_qk_l2norm": True}
        case = fuzz_gdn.Case(None, "decayed", given, leaves, options, None, None, ["initial_state"], True, False)
        actual, upstream = fuzz_gdn._call(case, given, [inputs.do])
        actual["dinitial_state"] = actual["dinitial_state"] * left
        tally = Tally()
        fuzz_gdn._judge(tally, case, actual, fuzz_gdn._expected(case, upstream), {}, upstream)
        return [failure.what for failure in tally.failures]

    assert judged(-60.0, torch.float16, left=0.0) == []
    assert judged(-60.0, torch.bfloat16, left=0.0) == ["dinitial_state"]
    assert judged(-10.0, torch.float16, left=0.98) == ["dinitial_state"]
    assert judged(-10.0, torch.float16, left=1.0) == []


def test_the_ple_oracle_is_each_document_alone() -> None:
    boundaries = (0, 0, 5, 6, 20)
    tensors = ple_inputs(1, 23, 3, 8, 4, dtypes=torch.float64, requires_grad=True)
    mask = (torch.rand(1, 23, generator=torch.Generator().manual_seed(0)) < 0.7).double()
    pair = (
        fuzz_ple.ple_oracle(tensors, 2, 1e-6, mask, boundaries),
        ple_packed(tensors, boundaries, dilation=2, conv_mask=mask),
    )
    dout = torch.randn(pair[0].shape, dtype=torch.float64)
    grads = [torch.autograd.grad(out, tensors, dout) for out in pair]
    for ours, theirs in zip((pair[0], *grads[0]), (pair[1], *grads[1]), strict=True):
        torch.testing.assert_close(ours, theirs)
