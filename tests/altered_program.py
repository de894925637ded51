"""Runs `numaserve` with another entry point in its workers or loaders, for programs here that break it on purpose."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import service.cli.serve
from placement.launcher import LauncherConfig
from service.cli.main import main


def main_with(**entries: str) -> int:
    """The exit status of the command line, where these fields of LauncherConfig, as `worker_entry`, are others."""
    original = service.cli.serve.launcher_config

    def altered(*arguments: object) -> LauncherConfig:
        return replace(original(*arguments), **entries)  # type: ignore[arg-type]

    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
    service.cli.serve.launcher_config = altered
    return main()
