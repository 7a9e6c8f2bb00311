"""Sparse, mkldnn and nested tensors at every op: refused by name, never read as if they had strides."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

import ple_gdn
from ple_gdn.ops.schemas import SCHEMAS

pytestmark = pytest.mark.usefixtures("one_thread")

NOT_STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
    "sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(2).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2)]),
}
VALUES = {"int": 1, "SymInt": 1, "float": 1.0, "bool": False, "str": "", "List[int]": [1]}
# Those of a context parallel call want a context first.
FRONTS = sorted(n for n in set(SCHEMAS) & set(ple_gdn.__all__) if not n.startswith("kcp_"))
INTEGERS = ("streams", "group_size", "dilation")


def arguments_of(name: str) -> list[torch.Argument]:
    return list(getattr(torch.ops.ple_gdn, name).default._schema.arguments)


def is_tensor(argument: torch.Argument) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("faked", [False, True], ids=["run", "traced"])
def test_every_tensor_of_every_op_must_be_strided(name: str, faked: bool) -> None:
    arguments = arguments_of(name)
    sparse, dense = NOT_STRIDED["sparse_coo"](), torch.zeros(2)
    if faked:
        mode = FakeTensorMode()
        sparse, dense = mode.from_tensor(sparse), mode.from_tensor(dense)
    tensors = [a.name for a in arguments if is_tensor(a)]
    assert tensors
    for refused in tensors:
        given = {a.name: dense if is_tensor(a) else VALUES[str(a.type)] for a in arguments if not a.has_default_value()}
        with pytest.raises(TypeError, match=rf"{refused}: expected a dense tensor \(torch.strided\), got a sparse_coo"):
            getattr(torch.ops.ple_gdn, name)(**given | {refused: sparse})


@pytest.mark.parametrize("layout", NOT_STRIDED)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.filterwarnings("ignore:.*(CSR|nested tensors):UserWarning")
def test_fronts_refuse_every_layout_by_name(front: str, layout: str) -> None:
    parameters = inspect.signature(getattr(ple_gdn, front)).parameters
    tensors = [a.name for a in arguments_of(front) if is_tensor(a) and a.name in parameters]
    assert tensors
    for refused in tensors:
        given = {n: torch.zeros(2) for n in tensors if parameters[n].default is inspect.Parameter.empty}
        given |= {n: 1 for n in INTEGERS if n in parameters}
        with pytest.raises(
            TypeError, match=rf"{refused}: expected a dense tensor .*got a {layout} one.*\.to_dense\(\)"
        ):
            getattr(ple_gdn, front)(**given | {refused: NOT_STRIDED[layout]()})


def test_a_sparse_upstream_gradient_is_refused_by_name() -> None:
    x = torch.randn(1, 5, 4, requires_grad=True)
    y = ple_gdn.causal_conv1d(x, torch.randn(4, 4))
    with pytest.raises(TypeError, match="dy: expected a dense tensor"):
        y.backward(torch.ones_like(y).to_sparse())
