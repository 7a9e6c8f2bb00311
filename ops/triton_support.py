"""Whether Triton kernels can run on a device: version guards, and one warning where they cannot."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging

import torch

logger = logging.getLogger("ple_gdn")

MINIMUM_TRITON = (3, 6)
MINIMUM_CAPABILITY = (8, 0)


@functools.cache
def missing_triton() -> str | None:
    """Why Triton cannot be used at all, or None: said once, kept for `explain`.

    Raises:
        RuntimeError: a Triton older than the kernels are written for.
    """
    try:
        triton = importlib.import_module("triton")
        importlib.import_module("triton.language")
        found = triton.__version__
    except (
        Exception
    ) as error:  # a broken install raises anything: OSError of a library, AttributeError of an empty folder
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    version = tuple(int(part) for part in found.split(".")[:2])
    if version < MINIMUM_TRITON:
        raise RuntimeError(
            f"ple_gdn kernels need triton >= {'.'.join(map(str, MINIMUM_TRITON))}, found {found}; "
            "install the triton that belongs to torch >= 2.11, or uninstall triton to run the reference path"
        )
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("%s: CUDA tensors take the reference path, which is far slower", reason)


@functools.cache
def _check_capability(index: int | None) -> None:
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip is None and capability < MINIMUM_CAPABILITY:
        raise RuntimeError(
            f"ple_gdn kernels need a GPU of compute capability >= {MINIMUM_CAPABILITY[0]}.{MINIMUM_CAPABILITY[1]}, "
            f"{torch.cuda.get_device_name(index)} has {capability[0]}.{capability[1]}; run on the CPU instead"
        )


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Launches go to `device`; nothing for the CPU, where Triton's interpreter runs the kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def triton_ready(device: torch.device) -> bool:
    """True if tensors on `device` take the Triton kernels, False if the reference path.

    A CPU tensor takes the reference silently, a CUDA tensor without Triton does so with one warning (logger `ple_gdn`).

    Raises:
        RuntimeError: a Triton or a GPU on which the kernels would be wrong.
    """
    if device.type != "cuda":
        return False
    reason = missing_triton()
    if reason is not None:
        _warn_once(reason)
        return False
    _check_capability(device.index)
    return True
