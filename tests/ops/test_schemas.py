"""The schema table is what is registered, argument by argument."""

from __future__ import annotations

import pytest
import torch

import ple_gdn
from ple_gdn.ops.schemas import NAMESPACE, SCHEMAS


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_op_has_the_schema_of_the_table(name: str) -> None:
    schema = getattr(torch.ops.ple_gdn, name).default._schema
    expected = torch._C.parse_schema(f"{NAMESPACE}::{name}{SCHEMAS[name]}")
    assert str(schema) == str(expected)
    assert not schema.is_mutable


def test_every_registered_op_stands_in_the_table() -> None:
    assert ple_gdn.__name__ == NAMESPACE
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(f"{NAMESPACE}::")
    }
    assert names
    assert names <= set(SCHEMAS)
