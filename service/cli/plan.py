"""Show what `serve` would do with a model on this host; exit with 1 when something is refused."""

from __future__ import annotations

import argparse
import json
import sys

from placement.permissions import probe_permissions
from placement.plan import make_plan
from placement.plan_report import plan_json, plan_lines
from placement.topology import read_topology
from service.cli.model_flags import add_weight_flags, backend_from
from service.cli.placement_flags import add_placement_flags, plan_request_from

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `numaserve plan`: those of `serve` that decide about placement and size."""
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="folder in Hugging Face layout, or a hub name"
    )
    add_weight_flags(parser)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=_DTYPES)
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="tokens per KV block")
    parser.add_argument(
        "--max-model-len", type=int, default=0, metavar="TOKENS", help="longest prompt and answer"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, see docs/topology-schema.md")
    add_placement_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns 0, or 1 when something is refused."""
    from service.loader.checkpoint import CheckpointError
    from service.loader.hub import ModelNotFound, resolve_model
    from service.loader.model_size import measure
    from service.models.config import ConfigError

    try:
        for flag, least in (("block_size", 1), ("max_model_len", 0)):
            if getattr(args, flag) < least:
                raise ValueError(
                    f"--{flag.replace('_', '-')} must be {least} or more, not {getattr(args, flag)}"
                )
        backend, quantization = backend_from(args)
        model_dir = resolve_model(args.model)
        sizes = measure(model_dir, args.dtype, args.kv_cache_dtype, args.block_size, backend, quantization)
        if args.max_model_len > sizes.context_length:
            length = sizes.context_length
            raise ValueError(f"--max-model-len {args.max_model_len}: the model's context length is {length}")
    except (ValueError, ModelNotFound, CheckpointError, ConfigError) as error:
        print(f"refused  {error}", file=sys.stderr)
        return 1
    plan = make_plan(plan_request_from(args, sizes), read_topology(), probe_permissions())
    print(json.dumps(plan_json(plan), indent=2) if args.json else "\n".join(plan_lines(plan)))
    return 1 if plan.refusals else 0
