"""Packed rows of an unedited model: each document's outputs and gradients are those of the document run alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hf import tiny
from hf.capture import Capture, fresh
from ple_gdn.options import Options

pytest.importorskip("transformers")

TOKENS = 40
TWO, THREE = (13, 27), (9, 16, 15)


@pytest.fixture(autouse=True)
def _forget() -> None:
    fresh()


def positions(lengths: tuple[int, ...], rows: int = 1) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).expand(rows, -1).contiguous()


def arguments(kind: str, lengths: tuple[int, ...], rows: int = 1) -> dict[str, Any]:
    """What transformers' DataCollatorWithFlattening gives, with the named option on."""
    position_ids = positions(lengths, rows)
    if kind == "cu_seq_lens_q":
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        return {"position_ids": position_ids, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest}
    if kind == "document_boundaries":  # what README says to pass where position ids are all there is
        bounds = torch.ops.ple_gdn.document_boundaries(position_ids, kind="position_ids")
        return {"position_ids": position_ids, "cu_seq_lens_q": bounds}
    if kind == "seq_idx":
        marks = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
        return {"position_ids": position_ids, "seq_idx": marks.expand(rows, -1).contiguous()}
    return {"position_ids": position_ids}


def documents_of(ids: torch.Tensor, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    return [document for row in ids.split(1) for document in row.split(lengths, dim=1)]


def assert_as_alone(packed: tiny.Step, alone: tiny.Step) -> None:
    torch.testing.assert_close(packed[0].reshape(alone[0].shape), alone[0], rtol=1e-5, atol=1e-6)
    name, ratio = tiny.worst_gradient(packed[1], alone[1])
    assert ratio <= 1, (name, ratio)


def check(
    model: nn.Module, how: str, kind: str, capture: Capture, packs: tuple[tuple[int, ...], ...], rows: int = 1
) -> None:
    ids = tiny.tokens(rows, TOKENS)
    alone = [tiny.step_alone(model, documents_of(ids, lengths)) for lengths in packs]
    tiny.compile_model(model, how, capture, fullgraph=True)
    for lengths, expected in zip(packs, alone, strict=True):
        first = positions(lengths, rows) == 0
        assert_as_alone(tiny.step(model, ids, first, **arguments(kind, lengths, rows)), expected)


@pytest.mark.parametrize(
    "kind", ["cu_seq_lens_q", "seq_idx", pytest.param("document_boundaries", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_and_three_documents_per_layer(kind: str, checkpoint: bool):
    model, capture = tiny.build(**tiny.TWO_LAYERS), Capture()
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(model, "layers", kind, capture, (TWO, THREE))
    assert capture.count("ple_gate_conv")
    # Two layer kinds; the number of documents becomes symbolic at its first change and recompiles no more.
    assert len(capture.graphs) <= 4


@pytest.mark.parametrize("checkpoint", [False, True])
def test_position_ids_of_a_flattening_collator_reach_every_layer(checkpoint: bool):
    model, capture = tiny.build(**tiny.TWO_LAYERS), Capture()
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(model, "whole", "position_ids", capture, (TWO, THREE))
    assert len(capture.graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seq_idx", "position_ids"])
def test_a_batch_of_packed_rows(kind: str):
    check(tiny.build(**tiny.TWO_LAYERS), "whole", kind, Capture(), (TWO,), rows=2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [Options(fuse=False), Options(rounding="eager_all")], ids=["fuse", "eager_all"])
@pytest.mark.parametrize(("kind", "rows"), [("cu_seq_lens_q", 1), ("position_ids", 2)])
def test_an_unfused_ple_block_keeps_documents_apart(options: Options, kind: str, rows: int):
    capture = Capture(options)
    check(tiny.build(**tiny.TWO_LAYERS), "whole", kind, capture, (TWO,), rows=rows)
    assert not capture.count("ple_gate_conv")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "olmo_hybrid"])
@pytest.mark.parametrize("kind", ["cu_seq_lens_q", "seq_idx", "position_ids"])
def test_other_families(family: str, kind: str):
    check(tiny.build(family), "whole", kind, Capture(), (TWO, THREE))


def test_boundaries_matter_for_every_stateful_part():
    """The same model with the boundaries withheld differs: a check that could not fail would prove nothing."""
    model, ids = tiny.build(**tiny.TWO_LAYERS), tiny.tokens(1, TOKENS)
    alone = torch.cat([model(input_ids=d, use_cache=False).logits for d in documents_of(ids, TWO)], 1)
    leaking = model(input_ids=ids, use_cache=False, position_ids=positions(TWO)).logits
    torch.testing.assert_close(alone[:, : TWO[0]], leaking[:, : TWO[0]], rtol=1e-5, atol=1e-6)
    assert (alone - leaking)[:, TWO[0] :].abs().max() > 1e-3


def test_a_models_own_positions_make_no_documents():
    model, capture = tiny.build("qwen3_5"), Capture()
    tiny.compile_model(model, "whole", capture, fullgraph=True)
    tiny.step(model, tiny.tokens(2, TOKENS))
    assert not capture.count("document_boundaries")
    assert capture.count("gated_delta_rule") == 2


def test_one_boundaries_object_in_two_arguments_and_two_equal_ones():
    """`cu_seq_lens_q is cu_seq_lens_k` is one collator's habit, two clones another's: at most one more compile."""
    model, ids, capture = tiny.build("qwen3_5"), tiny.tokens(1, TOKENS), Capture()
    tiny.compile_model(model, "whole", capture, fullgraph=True)
    same = arguments("cu_seq_lens_q", TWO)
    apart = same | {"cu_seq_lens_k": same["cu_seq_lens_k"].clone()}
    outputs = [tiny.step(model, ids, **given)[0] for given in (same, apart, same)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert len(capture.graphs) <= 2


def test_varying_documents_and_lengths_compile_at_most_twice():
    model, capture = tiny.build("qwen3_5", num_hidden_layers=1, layer_types=[tiny.LINEAR]), Capture()
    tiny.compile_model(model, "whole", capture, fullgraph=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for documents in range(2, 12):
            lengths = tuple(torch.randint(2, 30, (documents,), generator=generator).tolist())
            model(input_ids=tiny.tokens(1, sum(lengths)), use_cache=False, **arguments("cu_seq_lens_q", lengths))
    assert len(capture.graphs) <= 2


def test_boundary_marks_become_cu_seqlens():
    marks = torch.ops.ple_gdn.document_boundaries
    found = marks(torch.tensor([[4, 4, 7, 7, 7, 5]]), kind="seq_idx")
    assert found.tolist()[:4] == [0, 2, 5, 6]
    assert set(found.tolist()[4:]) == {6}
    assert marks(torch.tensor([[0, 1, 0, 0, 1, 2]]), kind="position_ids").tolist()[:4] == [0, 2, 3, 6]
    # A document never spans two rows.
    assert marks(torch.tensor([[0, 1], [2, 3]]), kind="position_ids").tolist()[:3] == [0, 2, 4]
    assert marks(torch.zeros(1, 0, dtype=torch.int64), kind="seq_idx").unique().tolist() == [0]
    torch.library.opcheck(marks, (torch.tensor([[0, 1, 0, 0, 1, 2]]),), {"kind": "position_ids"})


def test_more_documents_than_marks_have_room_for_raise():
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        torch.ops.ple_gdn.document_boundaries(torch.zeros(1, 300, dtype=torch.int64), kind="position_ids")


@pytest.mark.parametrize(
    ("index", "kind", "error"),
    [
        (torch.zeros(4, dtype=torch.int64), "seq_idx", "index: expected 2 dimensions"),
        (torch.zeros(1, 4), "seq_idx", "index: expected an integer dtype, got float32"),
        (torch.zeros(1, 4, dtype=torch.int64), "ids", "kind: expected one of 'seq_idx', 'position_ids', got 'ids'"),
    ],
)
def test_bad_marks_are_named(index: torch.Tensor, kind: str, error: str):
    with pytest.raises((ValueError, TypeError), match=error):
        torch.ops.ple_gdn.document_boundaries(index, kind=kind)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one rank, with buckets that end inside a layer as real ones do at real sizes."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 3000)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled_under_ddp(how: str, capture: Capture) -> tuple[nn.Module, nn.Module]:
    model = tiny.build(**tiny.TWO_LAYERS)
    tiny.compile_model(model, how, capture)
    return model, DistributedDataParallel(model, bucket_cap_mb=0.01)


def packed_step(model: nn.Module, wrapped: nn.Module, kind: str) -> tiny.Step:
    model.zero_grad()
    return tiny.step(wrapped, tiny.tokens(1, TOKENS), positions(TWO) == 0, **arguments(kind, TWO))


@pytest.mark.parametrize(
    ("how", "kind"), [("layers", "cu_seq_lens_q"), ("whole", "cu_seq_lens_q"), ("whole", "position_ids")]
)
def test_buckets_that_cut_boundaries_off_a_stateful_part_fail_the_compile(small_buckets: None, how: str, kind: str):
    model, wrapped = compiled_under_ddp(how, Capture())
    with pytest.raises(BackendCompilerFailed, match=r"packed documents would mix in .*optimize_ddp = False"):
        packed_step(model, wrapped, kind)


@pytest.mark.parametrize(("how", "kind"), [("layers", "cu_seq_lens_q"), ("whole", "position_ids")])
def test_the_remedy_under_ddp_keeps_documents_apart(small_buckets: None, how: str, kind: str):
    model, wrapped = compiled_under_ddp(how, Capture())
    alone = tiny.step_alone(tiny.build(**tiny.TWO_LAYERS), documents_of(tiny.tokens(1, TOKENS), TWO))
    with torch._dynamo.config.patch(optimize_ddp=False):
        packed = packed_step(model, wrapped, kind)
    assert_as_alone((packed[0], {n.removeprefix("module."): g for n, g in packed[1].items()}), alone)


def test_rows_that_are_no_packs_train_in_buckets(small_buckets: None):
    capture, ids = Capture(), tiny.tokens(2, TOKENS)
    eager = tiny.step(tiny.build(**tiny.TWO_LAYERS), ids)
    _, wrapped = compiled_under_ddp("whole", capture)
    logits, gradients = tiny.step(wrapped, ids)
    assert len(capture.graphs) > 3
    assert_as_alone((logits, {n.removeprefix("module."): g for n, g in gradients.items()}), eager)


@pytest.mark.parametrize("part", ["linear_attn", "ple"])
def test_a_checkpoint_between_ple_and_its_chunk_rule_fails_the_compile(part: str):
    model = tiny.build(**tiny.TWO_LAYERS)
    module = next(getattr(layer, part) for layer in model.model.layers if layer.ple is not None)
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    tiny.compile_model(model, "layers", Capture())
    with pytest.raises(BackendCompilerFailed, match="checkpoint around the whole decoder layer"):
        packed_step(model, model, "cu_seq_lens_q")
