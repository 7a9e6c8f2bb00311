"""Repeated work of a cold compile is done once, with the same outcome."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config, cpu_vec_isa, utils
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

from ple_gdn.lowerings import inductor_costs


class Isa:
    def __init__(self, flags: str, works: bool) -> None:
        self.flags, self.works, self.checks = flags, works, 0

    def __str__(self) -> str:
        return self.flags

    def __bool__(self) -> bool:
        self.checks += 1
        return self.works


@pytest.fixture
def extensions(monkeypatch):
    """A CPU with the extensions "strong" and "weak"; the compiler's verdict on each is given by name."""

    def make(**works):
        isas = [Isa("absent", True), Isa("strong", works["strong"]), Isa("weak", works["weak"])]
        monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", isas)
        monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["strong", "weak"])
        monkeypatch.setattr(cpu_vec_isa.platform, "machine", lambda: "x86_64")
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        return isas

    yield make
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def test_only_the_best_vector_extension_is_checked_when_it_works(extensions):
    absent, strong, weak = extensions(strong=True, weak=True)
    inductor_costs.check_best_only()
    assert cpu_vec_isa.valid_vec_isa_list() == [strong, weak]
    assert (absent.checks, weak.checks) == (0, 0)
    assert strong.checks


def test_the_next_one_is_found_when_the_best_does_not_work(extensions):
    _, _, weak = extensions(strong=False, weak=True)
    inductor_costs.check_best_only()
    assert cpu_vec_isa.valid_vec_isa_list() == [weak]
    assert weak.checks


def test_a_users_own_verdict_stands(extensions):
    _, strong, weak = extensions(strong=True, weak=True)
    with config.patch({"cpp.vec_isa_ok": True}):
        inductor_costs.check_best_only()
    assert (strong.checks, weak.checks) == (0, 0)


def test_dtype_rules_are_filled_once_and_again_when_there_are_more(monkeypatch):
    inductor_costs.keep_dtype_rules()
    once = DtypePropagationOpsHandler.__init__
    inductor_costs.keep_dtype_rules()
    assert DtypePropagationOpsHandler.__init__ is once
    handler = DtypePropagationOpsHandler()
    rule = handler.sin
    assert DtypePropagationOpsHandler() is handler
    assert handler.sin is rule
    more = utils.op_dtype_propagation_rules | {
        "ple_gdn_test_rule": next(iter(utils.op_dtype_propagation_rules.values()))
    }
    monkeypatch.setattr(utils, "op_dtype_propagation_rules", more)
    assert callable(DtypePropagationOpsHandler().ple_gdn_test_rule)
    assert handler.sin is not rule
    assert torch.compile(torch.sin, backend="ple_gdn")(torch.zeros(3)).eq(0).all()
