"""Work that Inductor does again and again in a cold compile, done once. Nothing here changes what it generates."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

from torch._inductor import config, cpu_vec_isa, utils
from torch._inductor.codegen import common
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler


def check_best_only() -> None:
    """Has Inductor test-compile the best vector extension of this x86 CPU alone; the weaker ones follow from it.

    Inductor test-compiles, links and loads (in a new Python process) up to ten small programs, for AMX down to AVX2, in
    the first compile of a process without caches: 12 of 115 seconds in a profiled one. Where the best
    one fails, or the user has decided (`cpp.vec_isa_ok`), Inductor checks as ever.
    """
    if config.cpp.vec_isa_ok is not None or cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        return
    flags = cpu_vec_isa.x86_isa_checker()
    of_this_cpu = [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in flags for flag in str(isa).split())]
    if len(of_this_cpu) < 2:
        return
    best, *weaker = of_this_cpu
    with mock.patch.object(cpu_vec_isa, "supported_vec_isa_list", [best]):
        valid = cpu_vec_isa.valid_vec_isa_list()
    if best in valid:
        valid.extend(weaker)
    else:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()


def keep_dtype_rules() -> None:
    """Inductor's dtype rules live in a singleton that every use, one an operation of every kernel, fills anew.

    Its `__new__` returns the one instance, and Python then runs `__init__` on it: 20,540 times when a model
    of four layers compiles, 7 % of a profiled run. From now on it runs when the tables it reads have grown.
    """
    fill = DtypePropagationOpsHandler.__init__
    if getattr(fill, "__wrapped__", None) is not None:
        return

    @functools.wraps(fill)
    def fill_if_grown(self: Any) -> None:
        sizes = len(utils.op_dtype_propagation_rules), len(common.pointwise_overrides_data)
        if vars(self).get("_ple_gdn_filled_from") != sizes:
            fill(self)
            self._ple_gdn_filled_from = sizes

    DtypePropagationOpsHandler.__init__ = fill_if_grown
