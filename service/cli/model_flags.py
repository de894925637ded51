"""The flags that `serve` and `plan` share about a model's weights."""

from __future__ import annotations

import argparse

from placement.plan import Policy
from service.backends import BACKENDS, choose_backend
from service.models.packing import DEFAULT_GROUPS, QUANTIZATIONS, Quantization, parse_quantization


def add_weight_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags that decide how weights are stored and computed with."""
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of the weights (default: as stored)",
    )
    group.add_argument(
        "--backend",
        default="auto",
        choices=BACKENDS,
        help="what computes: native kernels (cpu) or torch; auto takes the kernels where they were built; "
        "GPTQ, AWQ and compressed-tensors checkpoints of integers need cpu",
    )
    group.add_argument(
        "--quantize",
        choices=("none", *QUANTIZATIONS),
        help="round the weights while they are loaded, those that the checkpoint holds rounded already excepted",
    )
    groups = ", ".join(f"{name} {size or 'whole row'}" for name, size in DEFAULT_GROUPS.items())
    group.add_argument(
        "--quantize-group-size",
        type=int,
        metavar="COLUMNS",
        help=f"columns that share a scale, 0 for a whole row (default: {groups})",
    )


def backend_from(args: argparse.Namespace) -> tuple[str, Quantization | None]:
    """The backend and the rounding that parsed flags ask for. Raises ValueError naming the flag."""
    quantization = parse_quantization(args.quantize, args.quantize_group_size)
    asked = args.backend
    if args.placement == Policy.SHARED.value:
        if asked == "cpu":
            raise ValueError(
                "--backend cpu: packs weights in memory of its own, and --placement shared has none: give --backend torch"
            )
        asked = "torch"
    return choose_backend(asked, quantization), quantization
