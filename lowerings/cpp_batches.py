"""C++ kernels of one graph compiled together: one compiler run a thread in place of one a kernel.

Inductor compiles every CPU kernel as a program of its own. Most of each run reads headers and links (0.7 s of a median
1.2 s), so 41 kernels cost 52 s where one program of all 41 costs 9 s. A graph compiled inside `batched()`
has `async_compile = BatchedCompile()` in its generated module: it collects the kernels and builds them on `wait`. The
module itself says so, hence a cached graph loaded by another process builds (or finds) the same programs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen import common
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.utils import clear_on_fresh_cache

from .inductor_costs import check_best_only

PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"
# The whole of a kernel's program: the prefix header and one function. Anything else is left to Inductor.
ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("ple_gdn_cpp_batches", default=False)

BINDING = """
static PyObject* kernel_{index}_py(PyObject* self, PyObject* args) {{
    try {{
        if(!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) != {count}) [[unlikely]]
            throw std::runtime_error("requires a tuple of {count} args");
        kernel_{index}({parsed}); Py_RETURN_NONE;
    }} catch(std::exception const& e) {{
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }} catch(...) {{
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
        return nullptr;
    }}
}}
static PyMethodDef kernel_{index}_method = {{"kernel_{index}", kernel_{index}_py, METH_VARARGS, ""}};
"""


@clear_on_fresh_cache
class _Programs(CppPythonBindingsCodeCache):
    """Shared objects whose one function returns the tuple of their kernels."""

    cache: ClassVar[dict[str, Callable[[], Any]]] = {}
    entry_function = "kernels"

    @staticmethod
    def cache_clear() -> None:
        _Programs.cache.clear()


def is_whole(source: str) -> bool:
    """A kernel that can share a program: no include but the prefix, one `kernel` and no other function beside it."""
    text = source.strip()
    return (
        text.startswith(PREFIX)
        and text.count("#include") == 1
        and len(ENTRY.findall(text)) == 1
        and text[len(PREFIX) :].lstrip().startswith('extern "C"')
    )


def program(kernels: Sequence[tuple[Sequence[str], str]]) -> str:
    """C++ source with every kernel of (argument types, source) under a name of its own, and their Python bindings."""
    bodies, bindings = [PREFIX], []
    for index, (argtypes, source) in enumerate(kernels):
        bodies.append(ENTRY.sub(f'extern "C" void kernel_{index}(', source.strip()[len(PREFIX) :]))
        parsed = ", ".join(f"parse_arg<{a.replace('const ', '')}>(args, {n})" for n, a in enumerate(argtypes))
        bindings.append(BINDING.format(index=index, count=len(argtypes), parsed=parsed))
    made = ", ".join(f"PyCFunction_New(&kernel_{index}_method, nullptr)" for index in range(len(kernels)))
    suffix = _Programs.suffix_template.format(
        arg_len=0,
        call_entry_func=f'return Py_BuildValue("({"N" * len(kernels)})", {made});',
        entry_func=_Programs.entry_function,
        extra_parse_arg="\n".join(bindings),
    )
    return "\n".join(bodies) + "\n" + suffix


def shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices of `sizes` split into at most `count` lists of nearly equal sums, largest first; order kept inside."""
    lists: list[list[int]] = [[] for _ in range(min(max(count, 1), len(sizes)))]
    sums = [0] * len(lists)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = sums.index(min(sums))
        lists[least].append(index)
        sums[least] += sizes[index]
    return [sorted(members) for members in lists]


@dataclasses.dataclass
class _Kernel:
    """Stands in the generated module for a kernel until `wait` has built it."""

    argtypes: Sequence[str]
    source: str


class BatchedCompile(AsyncCompile):
    """`AsyncCompile` for generated modules, its C++ kernels built together by `wait`."""

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        if not is_whole(source_code):
            return super().cpp_pybinding(argtypes, source_code)
        return _Kernel(argtypes, source_code)

    def wait(self, scope: dict[str, Any]) -> None:
        names = [name for name, value in scope.items() if isinstance(value, _Kernel)]
        if names:
            check_best_only()
        threads = get_compile_threads()
        pending = []
        for members in shares([len(scope[n].source) for n in names], threads):
            kernels = [(scope[names[i]].argtypes, scope[names[i]].source) for i in members]
            submit = self.submit if threads > 1 else None
            pending.append((members, _Programs.load_async(program(kernels), submit_fn=submit)))
        for members, load in pending:
            module: ModuleType = load()
            scope.update(zip((names[i] for i in members), module.kernels(), strict=True))
        super().wait(scope)


class BatchingWrapper(PythonWrapperCodegen):
    """Inductor's own wrapper code, but for the object that compiles the kernels."""

    @staticmethod
    def create(is_subgraph: bool, *args: Any, **kwargs: Any) -> PythonWrapperCodegen:
        if is_subgraph or not _active.get():
            return PythonWrapperCodegen.create(is_subgraph, *args, **kwargs)
        return BatchingWrapper()

    def write_header(self) -> None:
        super().write_header()
        self.imports.writeline(f"from {__name__} import BatchedCompile")
        self.header.writeline("async_compile = BatchedCompile()")


def register_cpp_batches() -> None:
    """Puts `BatchingWrapper` in the place of Inductor's Python wrapper for the CPU; another extension's stays."""
    common.init_backend_registration()
    cpu = common.device_codegens["cpu"]
    if cpu.wrapper_codegen is PythonWrapperCodegen:
        common.device_codegens["cpu"] = dataclasses.replace(cpu, wrapper_codegen=BatchingWrapper)


@contextlib.contextmanager
def batched() -> Iterator[None]:
    """Graphs that this thread compiles inside have their C++ kernels built together."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)
