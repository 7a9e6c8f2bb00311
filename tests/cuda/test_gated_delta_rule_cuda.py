"""Gated delta rule on a GPU against the float64 token recurrence, and its bitwise promises."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from oracles.gdn import NAMES, Case, assert_same_bits, make_case, oracle, relative_rms, run_front

import ple_gdn
from ple_gdn.ops.gated_delta_rule import configs

pytestmark = pytest.mark.cuda

LENGTHS = (130, 0, 1, 64, 65, 63, 7, 127, 129)
GROUPED = {"heads": 2, "value_heads": 6, "key_width": 128, "value_width": 128}
PLAIN = {torch.bfloat16: (4e-3, 5e-3), torch.float16: (2e-3, 2e-3), torch.float32: (1e-5, 1e-5)}
STRESS = {torch.bfloat16: (7e-3, 8e-3), torch.float16: (2e-3, 2e-3), torch.float32: (1e-4, 1e-3)}
MODES = (
    *("no_decay", "strong_decay", "mixed_decay", "one_reset", "beta_one", "beta_two", "beta_zero"),
    *("equal_keys", "nearer_equal_keys", "near_equal_keys", "zero_keys", "orthogonal_query", "large_state"),
)


def on_gpu(case: Case) -> Case:
    return Case(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in case))


def check(case: Case, budgets: tuple[float, float], **options: object) -> dict[str, torch.Tensor]:
    """Relative RMS of outputs and gradients within the budgets (states and 16-bit gradients, gate gradients)."""
    expected = oracle(case, case.q.shape[-1] ** -0.5, options.get("use_qk_l2norm", True))
    actual = run_front(case, **options)
    for name in NAMES:
        budget = budgets[name in ("dg", "dbeta")]
        # Gradients whose true value is 0 everywhere are measured against 1.
        scale = expected[name].square().mean().sqrt()
        error = relative_rms(actual[name], expected[name]) * min(1.0, scale.item() if scale < 1e-12 else 1.0)
        assert error <= budget, (name, error)
    return actual


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("use_qk_l2norm", [True, False])
def test_a_pack_with_empty_and_short_documents_meets_the_budget(dtype: torch.dtype, use_qk_l2norm: bool) -> None:
    case = make_case(LENGTHS, dtype=dtype, **GROUPED)
    if not use_qk_l2norm:
        unit = torch.nn.functional.normalize(case.k.double(), dim=-1) * 0.98
        case = case._replace(k=unit.to(dtype))
    check(on_gpu(case), PLAIN[dtype], use_qk_l2norm=use_qk_l2norm)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_adversarial_gates_and_keys_meet_the_budget(mode: str, dtype: torch.dtype) -> None:
    # Gates of -88 add up to -3000 in a chunk: decays of fp32 do not see it.
    budgets = PLAIN if mode == "mixed_decay" and dtype == torch.float32 else STRESS
    check(on_gpu(make_case((300, 65), mode=mode, dtype=dtype, **GROUPED)), budgets[dtype])


@pytest.mark.parametrize(("key_width", "value_width"), [(16, 16), (48, 80), (64, 64), (256, 256), (192, 96), (128, 64)])
def test_head_widths(key_width: int, value_width: int) -> None:
    case = make_case(LENGTHS, dtype=torch.bfloat16, key_width=key_width, value_width=value_width)
    check(on_gpu(case), PLAIN[torch.bfloat16])


@pytest.mark.parametrize("value_heads", [2, 4, 8, 16])
def test_groups_of_value_heads(value_heads: int) -> None:
    case = make_case((130, 70), dtype=torch.bfloat16, heads=2, value_heads=value_heads, key_width=64, value_width=64)
    check(on_gpu(case), PLAIN[torch.bfloat16])


def test_rows_of_no_document_are_zero_whatever_they_hold() -> None:
    case = make_case((130, 65), dtype=torch.bfloat16, trailing=70, **GROUPED)
    for tensor in (case.q, case.k, case.v, case.g, case.beta, case.do):
        tensor[:, -70:] = float("nan")
    actual = run_front(on_gpu(case))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (actual[name][:, -70:] == 0).all(), name
        assert actual[name].isfinite().all(), name


def test_twenty_runs_replayed_and_kept_give_the_same_bits() -> None:
    case = on_gpu(make_case(LENGTHS, dtype=torch.bfloat16, **GROUPED))
    first = run_front(case)
    for i in range(20):
        poison = torch.full((1 << 22,), float("nan"), device="cuda")
        del poison
        assert_same_bits(run_front(case, save_mode="full" if i % 2 else "light"), first)


def test_rebuilt_tapes_give_the_same_bits() -> None:
    case = on_gpu(make_case(LENGTHS, dtype=torch.bfloat16, **GROUPED))
    boundaries = torch.tensor(case.boundaries, device="cuda")
    op, backward = torch.ops.ple_gdn.gated_delta_rule, torch.ops.ple_gdn.gated_delta_rule_backward
    results = []
    for mode in ("none", "light", "full"):
        tapes = op(*case[:6], boundaries, use_qk_l2norm=True, save_mode=mode)[2:]
        results.append(
            backward(case.do, case.dfinal_state, *case[:6], boundaries, None, None, *tapes, use_qk_l2norm=True)
        )
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_a_document_in_a_pack_has_the_bits_it_has_alone() -> None:
    case = on_gpu(make_case((130, 65, 200), dtype=torch.bfloat16, **GROUPED))
    packed = run_front(case)
    for n, (start, end) in enumerate(zip(case.boundaries, case.boundaries[1:], strict=False)):
        rows = slice(start, end)
        alone = Case(
            *(x[:, rows] for x in case[:5]), case.initial_state[n : n + 1], (0, end - start),
            case.do[:, rows], case.dfinal_state[n : n + 1],
        )  # fmt: skip
        actual = run_front(alone, packed=False)
        for name in NAMES:
            state = name in ("final_state", "dinitial_state")
            assert torch.equal(actual[name], packed[name][n : n + 1] if state else packed[name][:, rows]), name


def test_documents_in_pieces_meet_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven documents of a tensor-parallel slice, (2, 6) heads, in pieces of one and two chunks, whole and in spans."""
    for dtype in (torch.bfloat16, torch.float32):
        sizes = GROUPED if dtype == torch.bfloat16 else {**GROUPED, "key_width": 32, "value_width": 32}
        case = on_gpu(make_case((300, 0, 1, 64, 65, 200, 17), dtype=dtype, **sizes))
        for length in (1, 2):
            monkeypatch.setattr(configs, "CUTS", ((1 << 30, length),))
            first = check(case, PLAIN[dtype])
            assert_same_bits(run_front(case, save_mode="full"), first)
        short = configs.SPANS._replace(leg=1, alone_bytes=0, span_bytes=0)
        monkeypatch.setattr(configs, "SPANS", short)
        assert_same_bits(run_front(case), first)
        monkeypatch.undo()


@pytest.mark.parametrize(
    "mode", ["no_decay", "strong_decay", "one_reset", "near_equal_keys", "beta_two", "large_state"]
)
def test_pieces_with_adversarial_gates_and_keys_meet_the_budget(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "CUTS", ((1 << 30, 1),))
    check(on_gpu(make_case((300, 65), mode=mode, dtype=torch.bfloat16, **GROUPED)), STRESS[torch.bfloat16])


def test_a_long_document_of_few_heads_has_the_bits_it_has_alone() -> None:
    """Pieces as pinned: 9,000 and 17,000 tokens of (2, 6) heads are cut, 100 are not."""
    case = on_gpu(make_case((9000, 100, 17000), dtype=torch.bfloat16, **GROUPED))
    packed = run_front(case)
    assert_same_bits(run_front(case, save_mode="full"), packed)
    for n, (start, end) in enumerate(pairwise(case.boundaries)):
        rows = slice(start, end)
        states = (case.initial_state[n : n + 1], (0, end - start), case.do[:, rows], case.dfinal_state[n : n + 1])
        actual = run_front(Case(*(x[:, rows] for x in case[:5]), *states), packed=False)
        for name in NAMES:
            ours = packed[name][n : n + 1] if "state" in name else packed[name][:, rows]
            assert torch.equal(actual[name], ours), (n, name)


def test_strided_inputs_and_expanded_gradients_give_the_same_bits() -> None:
    case = on_gpu(make_case((130, 65), dtype=torch.bfloat16, **GROUPED))
    case = case._replace(do=torch.ones_like(case.do), dfinal_state=torch.ones_like(case.dfinal_state))
    strided = case._replace(
        **{name: torch.stack([getattr(case, name)] * 2, -1)[..., 0] for name in ("q", "k", "v", "g", "beta")},
        do=case.do.new_ones(()).expand_as(case.do),
        dfinal_state=case.dfinal_state.new_ones(()).expand_as(case.dfinal_state),
    )
    assert_same_bits(run_front(strided), run_front(case))


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_inputs_that_begin_at_no_aligned_address_give_the_same_bits(dtype: torch.dtype) -> None:
    case = on_gpu(make_case((130, 65), dtype=dtype, **GROUPED))
    moved = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (*case[:6], case.do)]
    unaligned = case._replace(**dict(zip(case._fields, moved[:6], strict=False)), do=moved[6])
    assert unaligned.q.data_ptr() % 16
    assert_same_bits(run_front(unaligned), run_front(case))


def test_captured_in_a_graph_and_replayed_with_other_boundaries() -> None:
    case = on_gpu(make_case((64, 40, 24), dtype=torch.bfloat16, **GROUPED))
    boundaries = torch.tensor((0, 64, 104, 128), device="cuda")
    call = lambda: torch.ops.ple_gdn.gated_delta_rule(*case[:6], boundaries, use_qk_l2norm=True)[0]  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for values in ((0, 64, 104, 128), (0, 7, 7, 100)):
        boundaries.copy_(torch.tensor(values))
        graph.replay()
        assert torch.equal(captured, call())


SPAN_LENGTHS = (130, 0, 1, 400, 64, 65, 700, 0)
# Spans of one to four chunks; legs of one or two.
CUTS = ((1, 0), (2, 0), (2, 2 << 20))


def cut_into(monkeypatch: pytest.MonkeyPatch, leg: int, span_bytes: int) -> None:
    monkeypatch.setattr(configs, "SPANS", configs.SpanConfig(leg, 0, span_bytes))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 128), (torch.float16, 128), (torch.bfloat16, 64), (torch.float32, 32)]
)
@pytest.mark.parametrize("packed", [True, False])
def test_a_backward_in_spans_has_the_bits_of_one(
    packed: bool, dtype: torch.dtype, width: int, cut: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"heads": 2, "value_heads": 6, "key_width": width, "value_width": width, "dtype": dtype}
    case = on_gpu(make_case(SPAN_LENGTHS if packed else (700,), trailing=70 if packed else 0, **sizes))
    kept = run_front(case, save_mode="full", packed=packed)
    cut_into(monkeypatch, *cut)
    for _ in range(3):
        poison = torch.full((1 << 24,), float("nan"), device="cuda")
        del poison
        assert_same_bits(run_front(case, packed=packed), kept)
    boundaries = torch.tensor(case.boundaries, device="cuda") if packed else None
    inputs = (*case[:6], boundaries)
    none = [case.q.new_empty(0)] * 6
    backward = torch.ops.ple_gdn.gated_delta_rule_backward
    rebuilt = backward(case.do, case.dfinal_state, *inputs, None, None, *none, use_qk_l2norm=True)
    assert all(torch.equal(a, kept[name]) for a, name in zip(rebuilt, NAMES[2:], strict=True))


@pytest.mark.parametrize("pieces", [False, True])
def test_spans_are_captured_in_a_graph_and_replayed_with_other_boundaries(
    pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(monkeypatch, *CUTS[1])
    monkeypatch.setattr(configs, "CUTS", ((1 << 30, 2),) if pieces else ())
    case = on_gpu(make_case((400, 40, 260), dtype=torch.bfloat16, **GROUPED))
    boundaries = torch.tensor((0, 400, 440, 700), device="cuda")

    def call() -> list[torch.Tensor]:
        inputs = (*case[:6], boundaries)
        o, _, *tapes = torch.ops.ple_gdn.gated_delta_rule(*inputs, use_qk_l2norm=True)
        backward = torch.ops.ple_gdn.gated_delta_rule_backward
        return [o, *backward(case.do, None, *inputs, None, None, *tapes, use_qk_l2norm=True)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for values in ((0, 400, 440, 700), (0, 7, 7, 600), (0, 0, 650, 700)):
        boundaries.copy_(torch.tensor(values))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, call(), strict=True)), values


def test_the_peak_of_a_long_document_is_within_that_of_the_peer() -> None:
    """FlashQLA 0.1.3 at 1x32768, (16, 48), bf16: 3723 MiB of inputs, outputs, gradients, temporaries."""
    before = torch.cuda.memory_allocated()
    T, H, HV = 32768, 16, 48
    unit = lambda: torch.nn.functional.normalize(torch.randn(1, T, H, 128, device="cuda"), dim=-1)  # noqa: E731
    q, k = unit().bfloat16().requires_grad_(), unit().bfloat16().requires_grad_()
    v = torch.randn(1, T, HV, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = (torch.nn.functional.logsigmoid(torch.randn(1, T, HV, device="cuda")) / 4).requires_grad_()
    beta = torch.sigmoid(torch.randn(1, T, HV, device="cuda")).requires_grad_()
    leaves, do = (q, k, v, g, beta), torch.randn_like(v)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(ple_gdn.gated_delta_rule(*leaves)[0], leaves, do)
        peak = torch.cuda.max_memory_allocated() - before
        del gradients
    print(f"peak {peak / 2**20:.0f} MiB")
    assert peak <= 3500 << 20


def test_no_synchronising_call_with_boundaries_on_the_device() -> None:
    case = on_gpu(make_case((130, 65), dtype=torch.bfloat16, **GROUPED))
    boundaries = torch.tensor(case.boundaries, device="cuda")
    run_front(case, cu_seqlens=boundaries)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_front(case, cu_seqlens=boundaries)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_documents_than_a_grid_axis_holds() -> None:
    documents = 2048
    case = make_case((1,) * documents, dtype=torch.bfloat16, heads=1, value_heads=32, key_width=16, value_width=16)
    case = on_gpu(case)
    actual = run_front(case)
    alone = oracle(
        case._replace(
            **{name: getattr(case, name)[:, -1:] for name in ("q", "k", "v", "g", "beta", "do")},
            initial_state=case.initial_state[-1:], dfinal_state=case.dfinal_state[-1:], boundaries=(0, 1),
        ), 0.25, True,
    )  # fmt: skip
    assert relative_rms(actual["o"][:, -1:], alone["o"]) < 7e-3
    assert relative_rms(actual["dinitial_state"][-1:], alone["dinitial_state"]) < 7e-3


@pytest.mark.slow
def test_offsets_past_two_to_the_thirty_first() -> None:
    """B T HV V = 2^31 + 2^17, pieces, spans: the last 64 tokens and their gradients equal the same tokens alone."""
    tokens, heads, width = (1 << 20) + 64, 16, 128
    tail = make_case((64,), dtype=torch.bfloat16, heads=heads, value_heads=heads, key_width=width, value_width=width)
    tail = on_gpu(tail)
    whole = []
    for part in (*tail[:5], tail.do):
        whole.append(torch.zeros(1, tokens, *part.shape[2:], dtype=part.dtype, device="cuda"))
        whole[-1][:, -64:] = part
    results = []
    for *inputs, do in (whole, (*tail[:5], tail.do)):
        T = do.shape[1]
        inputs += [None, torch.tensor((0, T - 64, T), device="cuda")]
        o, _, *tapes = torch.ops.ple_gdn.gated_delta_rule(*inputs, use_qk_l2norm=True)
        backward = torch.ops.ple_gdn.gated_delta_rule_backward
        gradients = backward(do, None, *inputs, None, None, *tapes, use_qk_l2norm=True)[:5]
        results.append([x[:, -64:].clone() for x in (o, *gradients)])
        del o, tapes, gradients
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_plain_tf32_inverse_exceeds_the_budget_that_ours_meets() -> None:
    """Negative control on nearly equal keys at beta = 1: X of one chunk against float64 substitution."""
    from ple_gdn.ops.gated_delta_rule.prep import prep_kernel

    case = make_case((64,), mode="near_equal_keys", heads=1, value_heads=1, key_width=128, value_width=16)
    q, k, _, g, beta = (x.cuda() for x in case[:5])
    unit = k[0, :, 0].double()
    unit = unit * torch.rsqrt(unit.square().sum(-1, keepdim=True) + 1e-6)
    lower = torch.tril(unit @ unit.T, -1)
    expected = torch.linalg.solve_triangular(
        torch.eye(64, dtype=torch.float64, device="cuda") + lower * beta[0, :, 0].double(), -lower, upper=False
    )
    errors = {}
    for precision in ("tf32", "tf32x3"):
        gcum, k_rstd, qscale = (torch.empty(1, 64, 1, device="cuda") for _ in range(3))
        x = torch.empty(1, 64, 1, 64, device="cuda")
        prep_kernel[(1,)](
            q, k, g, beta, None, None, gcum, k_rstd, qscale, x, 1.0, 1, 64, 1,
            H=1, HV=1, K=128, BLOCK=32, VARLEN=False, L2NORM=True, PREC=precision, DOT="tf32x3", num_warps=1,
        )  # fmt: skip
        errors[precision] = (x[0, :, 0].double() - expected).abs().max().item()
    assert errors["tf32x3"] < 1e-4 < errors["tf32"], errors
