"""The `numaserve` command. Each subcommand is a module with `add_arguments` and `run`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib.metadata import version

COMMANDS = {
    "serve": "serve a model",
    "topology": "show what this host has and what is allowed here",
    "plan": "show what serve would do with a model, without doing it",
    "status": "show the workers, segments and memory of a running server",
    "verify": "measure again where the weights and KV caches of a running server are",
    "reload": "load the weights of a running server anew, without refusing a request",
    "scale": "change the number of workers of a running server",
    "drain": "let workers of a running server finish, and keep their places empty",
    "chat": "talk to a running server in the terminal",
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="numaserve",
        description="Serve a model from one shared, placed copy of its weights per NUMA node.",
    )
    parser.add_argument("--version", action="version", version=f"numaserve {version('numaserve')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"service.cli.{name}")
        subparser = subparsers.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    parsed = build_parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except BrokenPipeError:
        # The reader of our output (a pager, head) has left.
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
