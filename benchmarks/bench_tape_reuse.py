"""Checkpointed regions with a gated delta rule: backward time and peak with tapes kept, replayed and chosen ("auto").

    python benchmarks/bench_tape_reuse.py [--tokens 261987] [--save-mode full light]   # about a minute on an H200
    python benchmarks/bench_tape_reuse.py --device cpu --tokens 640 --width 32 --inner 512 --repeats 1

Region "open": rule, HV*V x HV*V projection, SwiGLU; the tapes that the rerun hands over live through the backward of
all that. Region "closed": projection, then the rule as last saver. Both eager, (H, HV) = (2, 6), one pack. Claims
checked, exit status 1 if one fails: in the open region the peak of the kept form is the tapes' bytes above replay's
(to 1 MiB) and "auto" has replay's peak; in the closed one "auto" takes at most 1.02 times the kept form's time.
On a GPU writes benchmarks/results/tape_reuse_h200.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import ple_gdn

MIB = 2**20
RESULTS = Path(__file__).parent / "results"
FORMS = {"kept": True, "replay": False, "auto": "auto"}
HEADS, VALUE_HEADS = 2, 6
PACK = (40961, 3000, 65000, 17, 9000, 120000, 24009)  # of 261,987 tokens; other totals are cut or filled up


def boundaries(tokens: int) -> list[int]:
    """The pack's boundaries, the last document cut or filled up to `tokens`."""
    ends = [0]
    for length in PACK:
        if ends[-1] + length < tokens:
            ends.append(ends[-1] + length)
    return [*ends, tokens]


class Region(torch.nn.Module):
    """A checkpointed region on q, k, v, g, beta and hidden states `[1, T, HV * width]`."""

    def __init__(self, closed: bool, width: int, inner: int, **options: object) -> None:
        super().__init__()
        size = VALUE_HEADS * width
        self.closed, self.options = closed, options
        self.proj = torch.nn.Linear(size, size, bias=False)
        self.up = None if closed else torch.nn.Linear(size, 2 * inner, bias=False)
        self.down = None if closed else torch.nn.Linear(inner, size, bias=False)

    def _rule(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor):
        return ple_gdn.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True, **self.options)[0]

    def _body(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor):
        if self.closed:
            return self._rule(q, k, self.proj(v.flatten(-2)).view_as(v), g, beta)
        y = self.proj(self._rule(q, k, v, g, beta).flatten(-2))
        gate, up = self.up(y).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._body, *inputs, use_reentrant=False)


def make_inputs(tokens: int, width: int, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=device)

    q, k, v = (normal(heads, width).bfloat16() for heads in (HEADS, HEADS, VALUE_HEADS))
    g = torch.nn.functional.logsigmoid(normal(VALUE_HEADS)) / 4
    return tuple(x.requires_grad_() for x in (q, k, v, g, normal(VALUE_HEADS).sigmoid()))


def peak_of(call: Callable[[], object], device: str) -> int:
    """Bytes alive at once at the worst moment of a call, beyond what was alive before it.

    On a GPU as asked for: the caching allocator leaves up to 1 MiB unused in each large block, by chance of its state.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        call()
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    live = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def milliseconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        call()
        return (time.process_time() - start) * 1e3
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4_000_000)  # 2 ms: the queue waits while the host enqueues
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


class Form:
    """One form of one region: a forward that leaves `backward` to be measured."""

    def __init__(self, args: argparse.Namespace, closed: bool, save_mode: str, reuse: bool | str) -> None:
        packing = ple_gdn.prepare_varlen(torch.tensor(boundaries(args.tokens), device=args.device))
        options = {"save_mode": save_mode, "reuse_recompute_tapes": reuse, "cu_seqlens": packing}
        torch.manual_seed(1)
        self.model = Region(closed, args.width, args.inner, **options).to(args.device, torch.bfloat16)
        self.inputs = make_inputs(args.tokens, args.width, args.device)
        self.leaves = (*self.inputs, *self.model.parameters())
        self.device = args.device

    def backward(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        y = self.model(*self.inputs)
        upstream = torch.ones_like(y)
        return lambda: torch.autograd.grad(y, self.leaves, upstream)

    def step_ms(self) -> float:
        """Forward and backward."""
        return milliseconds(lambda: self.backward()(), self.device)

    def backward_ms(self) -> float:
        return milliseconds(self.backward(), self.device)

    def peak(self) -> int:
        """Of the second backward: in the first, cuBLAS allocates the workspace of autograd's thread."""
        self.backward()()
        return peak_of(self.backward(), self.device)


def measure(args: argparse.Namespace, closed: bool, save_mode: str) -> dict:
    """Milliseconds (medians, the forms in turn) and peaks of the three forms, and what "auto" decided."""
    forms = {name: Form(args, closed, save_mode, reuse) for name, reuse in FORMS.items()}
    peaks, first = {}, None
    for name, form in forms.items():
        grads = form.backward()()
        first = grads if first is None else first
        if not all(torch.equal(a, b) for a, b in zip(first, grads, strict=True)):
            raise AssertionError(f"{name}: gradients differ from those of the kept form")
        del grads
        peaks[name] = form.peak()
    verdict = ple_gdn.last_tape_decision().verdict
    del first
    times = {name: ([], []) for name in forms}
    for _ in range(args.repeats):
        for name, form in forms.items():
            times[name][0].append(form.backward_ms())
            times[name][1].append(form.step_ms())
    medians = {name: [sorted(values)[len(values) // 2] for values in pair] for name, pair in times.items()}
    return {
        "region": "closed" if closed else "open",
        "save_mode": save_mode,
        "auto": verdict,
        "timed_on": args.device,
        "tape_bytes": tape_bytes(args, save_mode),
        "peak_bytes": peaks,
        "backward_ms": {name: values[0] for name, values in medians.items()},
        "step_ms": {name: values[1] for name, values in medians.items()},
    }


def tape_bytes(args: argparse.Namespace, save_mode: str) -> int:
    sizes = (HEADS, VALUE_HEADS, args.width, args.width)
    packed = torch.tensor(boundaries(args.tokens))
    return ple_gdn.gdn_saved_bytes(packed, *sizes, dtype=torch.bfloat16, save_mode=save_mode)


def failures(row: dict) -> list[str]:
    """Claims of the module docstring that the row breaks."""
    peaks, out = row["peak_bytes"], []
    if row["region"] == "open":
        gap = peaks["kept"] - peaks["replay"]
        if abs(gap - row["tape_bytes"]) > MIB:
            out.append(f"kept - replay = {gap / MIB:.2f} MiB, the tapes have {row['tape_bytes'] / MIB:.2f}")
        if row["auto"] != "replay" or abs(peaks["auto"] - peaks["replay"]) > MIB:
            out.append(f"auto chose {row['auto']} with {peaks['auto'] / MIB:.2f} MiB")
        return out
    if row["auto"] != "hand-off":
        out.append(f"auto chose {row['auto']}")
    kept, auto = (row["backward_ms"][name] for name in ("kept", "auto"))
    if row["timed_on"] == "cuda" and auto > 1.02 * kept:  # on the CPU, times of small sizes say nothing
        out.append(f"auto took {auto:.3f} ms, kept {kept:.3f}")
    return out


def versions(device: str) -> dict[str, str]:
    if device == "cpu":
        return {"device": "cpu", "torch": torch.__version__}
    import common  # beside this script, which tests load from elsewhere

    return common.versions()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=sum(PACK))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--save-mode", nargs="+", choices=("light", "full"), default=("full", "light"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results on a GPU, nowhere on the CPU")
    args = parser.parse_args()
    rows = [measure(args, closed, mode) for closed in (False, True) for mode in args.save_mode]
    broken = {f"{row['region']} {row['save_mode']}": failures(row) for row in rows}
    out = args.out
    if out is None and args.device == "cuda":
        out = RESULTS / "tape_reuse_h200.json"
    if out is not None:
        about = versions(args.device)
        out.write_text(json.dumps({**about, "tokens": args.tokens, "rows": rows, "broken": broken}, indent=1) + "\n")
        print(f"written to {out}")
    for row in rows:
        tapes = f"tapes {row['tape_bytes'] / MIB:.2f} MiB, auto: {row['auto']}"
        print(f"region {row['region']}, save_mode {row['save_mode']}: {tapes}")
        for name in FORMS:
            figures = row["peak_bytes"][name] / MIB, row["backward_ms"][name], row["step_ms"][name]
            print("  {:7s} peak {:10.2f} MiB  backward {:9.3f} ms  step {:9.3f} ms".format(name, *figures))
    for where, which in broken.items():
        print(f"{where}: {'; '.join(f'FAILS: {failure}' for failure in which) or 'every claim holds'}")
    return int(any(broken.values()))


if __name__ == "__main__":
    sys.exit(main())
