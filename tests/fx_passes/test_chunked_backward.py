"""The chunked-backward pass: chunk rows as a number or an expression, refusals, numerics."""

from __future__ import annotations

import expecttest
import pytest
import torch
from oracles.ple import ple_inputs
from torch import Tensor

import ple_gdn
from ple_gdn.fx_passes import chunked_backward
from ple_gdn.fx_passes.records import PassContext, Records
from ple_gdn.options import Options

BACKWARD = torch.ops.ple_gdn.ple_gate_conv_backward.default


def loss(*tensors: Tensor) -> Tensor:
    return ple_gdn.ple_gate_conv(*tensors, dilation=3).sum()


def inputs(tokens: int, dynamic: bool = False) -> list[Tensor]:
    tensors = ple_inputs(1, tokens, 2, 8, 4, requires_grad=True)
    for x in tensors[:3] if dynamic else ():
        torch._dynamo.mark_dynamic(x, 1)
    return tensors


def chunk_lines(text: str) -> str:
    """The lines that carry the chunk rows."""
    return "\n".join(line.strip() for line in text.splitlines() if "sym_" in line or "chunk_rows" in line)


def test_a_static_length_gets_a_number():
    graphs = ple_gdn.capture_graphs(loss, *inputs(40), options={"workspace_bytes": 20_000})
    expected = "chunk_rows=35,"
    for text in (graphs.joint[0], graphs.backward[0], graphs.passes["chunked_backward"][0]):
        assert chunk_lines(text) == expected


class DynamicSnapshot(expecttest.TestCase):
    def test_a_symbolic_length_gets_an_expression_of_it(self):
        torch._dynamo.reset()
        graphs = ple_gdn.capture_graphs(loss, *inputs(40, dynamic=True), options={"workspace_bytes": 20_000})
        self.assertExpectedInline(
            chunk_lines(graphs.passes["chunked_backward"][0]),
            """\
sym_size: Sym(s0) = aten.sym_size.int(primals_2, 1)
sym_min: Sym(Min(35, s0)) = torch.sym_min(35, sym_size)
chunk_rows=sym_min,""",
        )
        assert "chunk_rows=sym_min" in graphs.backward[0]


def test_explain_names_rows_and_budget_and_the_gradients_are_the_ops():
    torch._dynamo.reset()
    report = ple_gdn.explain(loss, *inputs(40), options={"workspace_bytes": 20_000})
    (rewrite,) = [r for r in report.rewrites if r.pass_name == "chunked_backward"]
    assert rewrite.detail == "35 rows in 20000 bytes"
    compiled = torch.compile(loss, backend="ple_gdn", options={"workspace_bytes": 20_000}, dynamic=True)
    for tokens in (40, 77, 3):
        tensors = inputs(tokens)
        got = torch.autograd.grad(compiled(*tensors), tensors)
        want = torch.autograd.grad(loss(*tensors), tensors)
        for x, y in zip(got[:3], want, strict=False):
            assert torch.equal(x, y)
        for x, y in zip(got[3:], want[3:], strict=True):
            torch.testing.assert_close(x, y)


def by_hand(tensors: list[Tensor], **options) -> torch.fx.GraphModule:
    """A graph with one backward node, as a pass sees it."""
    _, stats = torch.ops.ple_gdn.ple_gate_conv(*tensors, dilation=3)
    values = [tensors[0], *tensors, None, None, stats]
    graph = torch.fx.Graph()
    nodes = [v if v is None else graph.placeholder(f"x{i}") for i, v in enumerate(values)]
    for node, value in zip(nodes, values, strict=True):
        if node is not None:
            node.meta["val"] = value
    graph.output(graph.call_function(BACKWARD, tuple(nodes), {"dilation": 3, **options}))
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("options", "rows", "reason"),
    [({"chunk_rows": 7}, 7, "the call names its own chunk_rows"), ({"workspace_bytes": 1}, 1, None), ({}, 9, None)],
)
def test_a_call_that_names_its_rows_keeps_them_and_the_reason_is_recorded(options, rows, reason):
    context = PassContext(Options(), Records())
    gm = by_hand([x.detach() for x in ple_inputs(1, 9, 2, 8, 4)], **options)
    chunked_backward.run(gm, context)
    (node,) = gm.graph.find_nodes(op="call_function", target=BACKWARD)
    assert node.kwargs["chunk_rows"] == rows
    assert [r.reason for r in context.records.refusals] == ([] if reason is None else [reason])
    assert len(context.records.rewrites) == (reason is None)


def test_symbolic_widths_are_left_to_the_op_and_recorded():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(assume_static_by_default=False):
        report = ple_gdn.explain(loss, *inputs(40))
    (refusal,) = [r for r in report.refusals if r.pass_name == "chunked_backward"]
    assert refusal.reason.startswith("symbolic widths (")
    assert refusal.reason.endswith("the op derives its chunks when it runs")
