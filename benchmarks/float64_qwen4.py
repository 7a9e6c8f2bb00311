"""Hugging Face's Qwen4-Exp with the float32 steps of its modeling file in float64: exact gradients of that model."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

NAME = hf.__name__ + "_float64"
# What pins a step of that file to float32 whatever the model's dtype is: norms, the delta rule, softmaxes, positions.
SPELLINGS = ((r"torch\.float(32)?\b", "torch.float64"), (r"\.float\(\)", ".double()"))


def float64_modeling() -> ModuleType:
    """The modeling file under another name (so that its relative imports hold), float32 spelled float64."""
    if NAME not in sys.modules:
        with open(hf.__file__, encoding="utf-8") as file:
            source = file.read()
        for pattern, replacement in SPELLINGS:
            source, count = re.subn(pattern, replacement, source)
            if not count:
                raise RuntimeError(f"{hf.__file__} has no {pattern}: this transformers release needs another spelling")
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, None))
        module.__package__, module.__file__ = hf.__package__, hf.__file__
        sys.modules[NAME] = module
        exec(compile(source, hf.__file__, "exec"), module.__dict__)
    return sys.modules[NAME]
