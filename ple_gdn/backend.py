"""`torch.compile(model, backend="ple_gdn")`: passes on Dynamo's graph, then Inductor with passes on the joint graph.

Torch imports this module at the `torch.compile()` call, so ops, lowerings and substitutions stand before any tracing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback, TorchDynamoException
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table

from . import fx_passes, lowerings, ops
from .collector import held
from .fx_passes import record_substitutions, rounding_boundaries
from .fx_passes.manager import (
    ChainedPass,
    JointPasses,
    Observer,
    cache_key,
    run_dynamo_passes,
    source_digest,
)
from .fx_passes.records import GraphPass, PassContext, PassFailure, Records
from .lowerings import cpp_batches, inductor_costs
from .lowerings.rounding import EAGER_CONFIG
from .ops.torch_versions import warn_if_untested
from .options import Options, parse_options
from .report import remember
from .substitutions import install_substitutions

log = logging.getLogger("ple_gdn")

warn_if_untested()
lowerings.register_lowerings()
install_substitutions()


class InvalidOptionValue(ShortenTraceback, ValueError):
    """A ValueError about `options=` that leaves Dynamo as it is, not wrapped into a backend failure."""


class InvalidOptionType(ShortenTraceback, TypeError):
    """A TypeError about `options=` that leaves Dynamo as it is, not wrapped into a backend failure."""


@functools.cache
def _sources() -> str:
    packages = (ops, lowerings, fx_passes)
    return source_digest([Path(__file__).parent, *(Path(p.__file__).parent for p in packages)])


@dataclass
class Compilation:
    """One graph on its way through the backend. Nothing here is shared between two compiles."""

    options: Options
    inductor_options: dict[str, Any]
    records: Records = field(default_factory=Records)
    passes: Sequence[GraphPass] = ()
    inner_compile: Callable[..., Any] = compile_fx_inner
    observer: Observer | None = None
    last_joint_passes: Sequence[Callable[[torch.fx.Graph], None]] = ()

    def patches(self) -> dict[str, Any]:
        """Inductor config of this compile, the user's own passes running after ours."""
        key = cache_key(_sources(), self.options)
        joint = JointPasses(self.passes, PassContext(self.options, self.records), key, self.observer)
        patches = self._chained("joint_custom_post_pass", joint, self.last_joint_passes)
        if self.options.rounding != "fast":
            patches |= self._chained("joint_custom_pre_pass", rounding_boundaries.HideFromJointPasses(key))
            patches |= self._chained("post_grad_custom_pre_pass", rounding_boundaries.RoundMarkedNodes(key))
        numerics = {} if self.options.rounding == "fast" else EAGER_CONFIG
        return {**numerics, **self.inductor_options, **patches}

    def _chained(self, key: str, ours: CustomGraphPass, last: Sequence[Callable[..., Any]] = ()) -> dict[str, Any]:
        theirs = self.inductor_options.get(key, getattr(inductor_config, key))
        theirs = theirs if isinstance(theirs, list | tuple) else [] if theirs is None else [theirs]
        chain = [ours, *theirs, *last]
        return {key: ChainedPass(chain) if len(chain) > 1 else ours}

    def run(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Rewrites and compiles `gm`; falls back to plain Inductor, loudly, if a rewritten graph does not compile."""
        rewritten = run_dynamo_passes(gm, self.passes, PassContext(self.options, self.records), self.observer)
        try:
            return compile_fx(
                gm,
                example_inputs,
                inner_compile=self._generate,
                config_patches=self.patches(),
                decompositions=rounding_boundaries.decompositions(self.options.rounding),
            )
        except Exception as error:
            control_flow = isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)
            if control_flow:
                raise
            failure = error
        for rewriting in rewritten:
            rewriting.before.restore(rewriting.gm)
        kept = Records()
        run_dynamo_passes(gm, [p for p in self.passes if p.required], PassContext(self.options, kept), self.observer)
        compiled = compile_fx(
            gm, example_inputs, inner_compile=self.inner_compile, config_patches=self.inductor_options or None
        )
        # Only now is it known that Inductor alone can: had it failed too, the model's own error would have been raised.
        substituted = [r for r in self.records.rewrites if r.pass_name == record_substitutions.NAME]
        self.records.rewrites[:] = substituted + kept.rewrites
        self.records.tapes.clear()
        self.records.failures.append(PassFailure("compile", f"{type(failure).__name__}: {failure}"))
        log.warning("the rewritten graph failed to compile; compiled without rewrites: %s", failure, exc_info=failure)
        return compiled

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        inductor_costs.check_best_only()
        with held(), cpp_batches.batched():
            return self._generate_within_caches(*args, **kwargs)

    def _generate_within_caches(self, *args: Any, **kwargs: Any) -> Any:
        # Torch 2.13 hashes the decompositions handed to it and cannot hash functions; our key covers the choice.
        if "get_decomp_fn" in kwargs:
            kwargs["get_decomp_fn"] = select_decomp_table
        if not self.records.failures:
            return self.inner_compile(*args, **kwargs)
        # A cached graph would come back in the next process without the pass and without a word.
        with inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
            return self.inner_compile(*args, **kwargs)


def open_compilation(mode: str | None, options: dict[str, Any] | None) -> Compilation:
    """Checks `mode` and `options`; raises ValueError or TypeError, in a form that Dynamo passes on to the user."""
    try:
        ours, inductor = parse_options(options)
        of_mode = list_mode_options(mode) if mode else {}
    except (ValueError, RuntimeError) as error:
        raise InvalidOptionValue(str(error), first_useful_frame=None) from None
    except TypeError as error:
        raise InvalidOptionType(str(error), first_useful_frame=None) from None
    passes = [p for p in fx_passes.PASSES if ours.fuse or p not in fx_passes.FUSIONS]
    return Compilation(ours, {**of_mode, **inductor}, passes=passes)


def ple_gdn(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend. `mode` is one of Inductor's modes; `options` holds `Options` fields and Inductor config keys.

    Raises ValueError or TypeError, naming the valid names, for an option that is neither; a pass that fails is undone,
    reported once on the logger "ple_gdn" and listed by `ple_gdn.last_report()`.
    """
    compilation = open_compilation(mode, options)
    with held():
        compiled = compilation.run(gm, example_inputs)
    remember(gm, compilation.records)
    return compiled


def _reset() -> None:
    """What `torch._dynamo.reset()` asks of a backend: drop the CUDA graphs of mode="reduce-overhead"."""
    if torch.cuda.is_initialized():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


ple_gdn.reset = _reset
