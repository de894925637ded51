"""Which backend computes a model, and how its weights are laid out for it. Imports no torch: the launcher asks."""

from __future__ import annotations

import logging

from service.kernels.layout import why_unusable
from service.models.config_reader import ConfigError
from service.models.packing import Quantization, pack_plan
from service.models.weights import WeightPlan

log = logging.getLogger("numaserve.launcher")

BACKENDS = ("auto", "cpu", "torch")
# The words of a segment's manifest for how its matrices lie. A new order in packed.h gets a new name, so that a program
# which is upgraded in place does not take over what it would misread.
ROWS = "plain"
PANELS = "panels-2"


def choose_backend(asked: str, quantization: Quantization | None = None) -> str:
    """ "cpu" (the native kernels) or "torch" (the reference); `auto` takes the kernels where they can be used.

    Raises ValueError, naming the flag, where what is asked for cannot be had.
    """
    problem = why_unusable() if asked != "torch" else None
    if asked == "cpu" and problem is not None:
        raise ValueError(f"--backend cpu: {problem}")
    backend = "torch" if asked == "torch" or problem is not None else "cpu"
    if backend == "torch" and quantization is not None:
        why = f": {problem}" if problem is not None else ""
        raise ValueError(f"--quantize {quantization.format}: only the cpu backend has integer weights{why}")
    if problem is not None:
        log.warning("%s; the torch backend serves, which is slower", problem)
    return backend


def layout_of(backend: str, quantization: Quantization | None = None) -> str:
    """How a segment's manifest names the arrangement; only segments of one name can stand in for each other."""
    if backend != "cpu":
        return ROWS
    return f"{PANELS} {quantization.name}" if quantization is not None else PANELS


def lay_out_for(backend: str, plan: WeightPlan, quantization: Quantization | None = None) -> WeightPlan:
    """The plan as the backend wants its weights in memory.

    Raises ConfigError for a checkpoint of integers that the backend cannot read.
    """
    if backend == "cpu":
        return pack_plan(plan, quantization)
    if plan.integers:
        why = why_unusable()
        problem = f"{plan.integers!r} weights of integers are read by --backend cpu alone, not by {backend}"
        raise ConfigError("quantization_config.quant_method", problem + (f": {why}" if why else ""))
    return plan
