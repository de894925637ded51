"""Finds the folder of a model: a path as it stands, or a hub name fetched through huggingface_hub.

The fetch runs in a process of its own (`python -m service.loader.hub NAME`), so that the launcher never has threads.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class ModelNotFound(ValueError):
    """`--model` names neither a folder nor a model that could be fetched."""


def resolve_model(name: str) -> Path:
    """The folder that `--model` means. Raises ModelNotFound."""
    folder = Path(name)
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise ModelNotFound(f"--model {name}: is a file, not a folder with config.json and *.safetensors")
    if not _HUB_NAME.fullmatch(name):
        raise ModelNotFound(f"--model {name}: there is no such folder")
    fetched = subprocess.run(
        [sys.executable, "-m", "service.loader.hub", name], stdout=subprocess.PIPE, text=True, check=False
    )
    if fetched.returncode != 0:
        raise ModelNotFound(
            f"--model {name}: there is no such folder, and the hub did not give a model of that name"
        )
    return Path(fetched.stdout.strip())


def main() -> int:
    """Fetch one model and print its folder."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        print("fetching a model by name needs the extra 'hub': pip install numaserve[hub]", file=sys.stderr)
        return 1
    try:
        print(snapshot_download(sys.argv[1], allow_patterns=_PATTERNS))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
