"""C++ kernels of one graph are built together, and nothing but the number of compiler runs changes."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config, cpp_builder
from torch._inductor.utils import fresh_cache, run_and_get_code

from ple_gdn.lowerings import cpp_batches
from ple_gdn.lowerings.cpp_batches import is_whole, program, shares


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Three kernels, kept apart by matrix products."""
    y = torch.sin(x) @ w
    z = torch.softmax(y, -1) @ w
    return z.tanh().sum(0)


@pytest.fixture
def programs(monkeypatch):
    """Source paths of the kernels' programs that the compiler was run on."""
    built = []
    compile_one = cpp_builder.run_compile_cmd

    def run(command, **where):
        built.extend(word for word in command.split() if word.endswith(".main.cpp"))
        return compile_one(command, **where)

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", run)
    return built


def arguments():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(40, 40, generator=generator, requires_grad=True) for _ in range(2)]


def step(backend, threads=1):
    torch._dynamo.reset()
    x, w = arguments()
    with config.patch(compile_threads=threads), fresh_cache():
        y = torch.compile(chain, backend=backend)(x, w)
        y.sum().backward()
    return y.detach(), x.grad, w.grad


def test_one_program_a_graph_with_the_bits_of_inductor(programs):
    ours = step("ple_gdn")
    assert len(programs) == 2  # forward, backward
    programs.clear()
    theirs = step("inductor")
    assert len(programs) > 3
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_one_program_a_thread_when_there_are_threads(monkeypatch):
    asked = []
    load_async = cpp_batches._Programs.load_async

    def load(source, submit_fn=None):
        asked.append((source.count('extern "C" void kernel_'), submit_fn is not None))
        return load_async(source)

    monkeypatch.setattr(cpp_batches._Programs, "load_async", load)
    step("ple_gdn", threads=2)
    assert len(asked) == 4
    assert all(kernels and submitted for kernels, submitted in asked)


def test_plain_inductor_compiles_as_before_in_the_same_process():
    torch._dynamo.reset()
    _, (ours,) = run_and_get_code(torch.compile(chain, backend="ple_gdn"), *(t.detach() for t in arguments()))
    torch._dynamo.reset()
    _, (theirs,) = run_and_get_code(torch.compile(chain, backend="inductor"), *(t.detach() for t in arguments()))
    assert "BatchedCompile" in ours
    assert "BatchedCompile" not in theirs


def test_a_kernel_called_with_too_few_arguments_raises():
    source = cpp_batches.PREFIX + '\nextern "C"  void  kernel(float* out, const float* in)\n{ out[0] = 2 * in[0]; }\n'
    with fresh_cache():
        first, second = cpp_batches._Programs.load_async(
            program([(["float*", "const float*"], source)] * 2)
        )().kernels()
    out = torch.zeros(1)
    second(out, torch.tensor([3.0]))
    assert out.item() == 6
    with pytest.raises(RuntimeError, match="2 args"):
        first(out)


@pytest.mark.parametrize(
    "more",
    [
        '\nextern "C" void kernel(float* a)\n{}\nextern "C" void kernel(float* b)\n{}',
        '\n#include <vector>\nextern "C" void kernel(float* a)\n{}',
        '\nstatic int helper() { return 1; }\nextern "C" void kernel(float* a)\n{}',
        '\nextern "C" void other(float* a)\n{}',
    ],
)
def test_sources_with_more_than_one_plain_kernel_are_left_to_inductor(more):
    assert is_whole(cpp_batches.PREFIX + '\nextern "C"  void  kernel(float* a)\n{}')
    assert not is_whole(cpp_batches.PREFIX + more)


def test_shares_are_whole_disjoint_and_balanced():
    sizes = [7, 1, 5, 5, 9, 2, 3]
    for count in (1, 2, 3, 10):
        lists = shares(sizes, count)
        assert sorted(i for members in lists for i in members) == list(range(len(sizes)))
        assert len(lists) == min(count, len(sizes))
        sums = [sum(sizes[i] for i in members) for members in lists]
        assert max(sums) - min(sums) <= max(sizes)
    assert shares([], 4) == []
