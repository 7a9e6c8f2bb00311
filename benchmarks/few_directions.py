"""Error of the gated delta rule where a chunk's keys point in few directions, against float64. CPU, 15 s.

    python benchmarks/few_directions.py [--width 64] [--tokens 129] [--seeds 3] [--device cuda]

g = 0, one q/k head and two value heads. Relative root mean squares, the worst of the seeds. Keys: `random`; `equal`;
`equal + x`, x of normal noise on normal values; `in turn`, two directions token by token. Norm 1 by l2norm inside, or
as given without.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from oracles.gdn_dense import gated_delta_rule_dense

import ple_gdn

# keys, norm (None: l2norm inside), beta
CASES = (
    *(("random", None, beta) for beta in (1.0, 2.0)),
    *(("equal", None, beta) for beta in (1.0, 2.0)),
    *((f"equal + {noise}", None, 1.0) for noise in (0.3, 0.1, 0.05, 0.02, 0.005)),
    *((f"equal + {noise}", None, 2.0) for noise in (0.3, 0.05)),
    *(("in turn", None, beta) for beta in (1.0, 2.0)),
    ("equal", 0.9, 1.0),
    ("equal", 0.99, 2.0),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def keys(kind: str, tokens: int, width: int) -> torch.Tensor:
    noise, two = torch.randn(1, tokens, 1, width), torch.randn(2, width)
    if kind == "random":
        return noise
    if kind == "in turn":
        return two[torch.arange(tokens) % 2][None, :, None]
    return two[0].expand(1, tokens, 1, width) + float(kind.partition("+")[2] or 0.0) * noise


def errors(kind: str, norm: float | None, beta: float, dtype: torch.dtype, args: argparse.Namespace) -> list[float]:
    """Of o, the final state and dbeta."""
    k = keys(kind, args.tokens, args.width)
    if norm is not None:
        k = norm * torch.nn.functional.normalize(k, dim=-1)
    q = torch.nn.functional.normalize(torch.randn(1, args.tokens, 1, args.width), dim=-1)
    v, do = (torch.randn(1, args.tokens, 2, args.width).to(dtype) for _ in range(2))
    gates = (torch.zeros(1, args.tokens, 2), torch.full((1, args.tokens, 2), beta))
    leaves = [x.to(args.device).requires_grad_() for x in (q.to(dtype), k.to(dtype), v, *gates)]
    found = ple_gdn.gated_delta_rule(*leaves, output_final_state=True, use_qk_l2norm=norm is None)
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    state = torch.zeros(1, 2, args.width, args.width, dtype=torch.float64)
    wanted = gated_delta_rule_dense(*exact, state, None, args.width**-0.5, norm is None)
    pairs = [*zip(found, wanted, strict=True)]
    found_beta, wanted_beta = (
        torch.autograd.grad(pair[0], beta, upstream)[0]
        for pair, beta, upstream in ((found, leaves[4], do.to(args.device)), (wanted, exact[4], do.double()))
    )
    pairs.append((found_beta, wanted_beta))
    return [((a.cpu().double() - b).norm() / b.norm()).item() for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    sizes = f"K = V = {args.width}, {args.tokens} tokens, g = 0, worst of {args.seeds} seeds"
    print(f"torch {torch.__version__}, {args.device}, {sizes}")
    print(f"{'keys':14s}{'norm':>8s}{'beta':>6s}  {'dtype':10s}{'o':>9s}{'state':>9s}{'dbeta':>9s}")
    for kind, norm, beta in CASES:
        for dtype in DTYPES:
            rows = []
            for seed in range(args.seeds):
                torch.manual_seed(seed)
                rows.append(errors(kind, norm, beta, dtype, args))
            cells = "".join(f"{max(column):9.1e}" for column in zip(*rows, strict=True))
            print(f"{kind:14s}{'l2norm' if norm is None else norm!s:>8s}{beta:6.1f}  {str(dtype)[6:]:10s}{cells}")


if __name__ == "__main__":
    main()
