"""Fixtures for tests of the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy import Toy


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    running: list[Toy] = []

    def starter(*counts: int, **options: object) -> Toy:
        running.append(Toy(tmp_path, *(counts or (2,)), **options))
        return running[-1]

    yield starter
    for toy in running:
        toy.process.kill()
        toy.process.wait()
