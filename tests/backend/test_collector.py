"""The cycle collector rests while a graph compiles and is as before afterwards."""

from __future__ import annotations

import gc

import pytest
import torch

from ple_gdn.collector import held


def test_overlapping_holders_release_it_together_also_when_one_raises():
    assert gc.isenabled()
    with held():
        with pytest.raises(ZeroDivisionError), held():
            1 / int(gc.isenabled())
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_the_user_turned_off_stays_off():
    gc.disable()
    try:
        with held():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_off_during_a_compile_and_on_in_the_step():
    seen = []

    def post(graph):
        seen.append(gc.isenabled())

    compiled = torch.compile(lambda x: x.sin() + 1, backend="ple_gdn", options={"post_grad_custom_post_pass": post})
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    assert seen == [False, False]
    assert gc.isenabled()
