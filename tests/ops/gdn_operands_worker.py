"""Run with TRITON_INTERPRET=1: the launchers on CPU tensors, the operand kernel as compiled PTX in `ptx_machine`.

Arguments: PTX files "INVERSE:shared bytes:path" ("rounding" for the kernel that rounds X anew), then document lengths.
Prints, as JSON, relative RMS errors of the
plain kernels and of the Hopper operands with the plain walks and gradients, against the float64 recurrence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracles.gdn import NAMES, make_case, oracle, relative_rms
from oracles.ptx_machine import Machine, Memory

from ple_gdn.ops.gated_delta_rule import hopper_operands, launch


class Compiled:
    """Stands for a kernel: `kernel[grid](...)` runs every program of its PTX, by INVERSE if that is a choice."""

    def __init__(self, files: list[str]) -> None:
        parts = [name.split(":", 2) for name in files]
        self.kernels = {name: (Path(path).read_text(), int(size)) for name, size, path in parts}

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def call(*arguments: object, INVERSE: bool | None = None, **constants: object) -> None:
            memory = Memory()
            values = [memory.place(a) if isinstance(a, torch.Tensor) else a for a in arguments if a is not None]
            ptx, shared = self.kernels["rounding" if INVERSE is None else str(INVERSE)]
            machine = Machine(ptx, shared, memory)
            for program in range(grid[0]):
                machine.run(program, [*values, 0, 0])

        return call


def outputs(case: object, hopper: bool, save_mode: str) -> dict[str, torch.Tensor]:
    launch.uses_hopper_operands = lambda p: hopper
    scale = case.q.shape[-1] ** -0.5
    shared = (*case[:6], torch.tensor(case.boundaries, dtype=torch.int32), None, None)
    o, final_state, *tapes = launch.launch_forward(*shared, scale, True, True, save_mode)
    gradients = launch.launch_backward(case.do, case.dfinal_state, *shared, *tapes, scale, True)
    return dict(zip(NAMES, (o, final_state, *gradients), strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    stand_in = Compiled([a for a in sys.argv[1:-1] if ":" in a])
    hopper_operands.hopper_operands_kernel = hopper_operands.hopper_rounding_kernel = stand_in
    sizes = {"heads": 1, "value_heads": 2, "key_width": 128, "value_width": 16}
    lengths = tuple(map(int, sys.argv[-1].split(",")))
    case = make_case(lengths, trailing=5, dtype=torch.float16, **sizes)
    expected = oracle(case, 128**-0.5, True)
    runs = [outputs(case, hopper, mode) for hopper in (False, True) for mode in ("light", "none")]
    errors = {n: [relative_rms(r[n], expected[n]) for r in (runs[0], runs[2])] for n in NAMES}
    same = all(torch.equal(runs[2][n], runs[3][n]) for n in NAMES)
    print(json.dumps({"errors": errors, "rebuilt = kept": same}))
