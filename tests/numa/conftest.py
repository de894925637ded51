"""The model that guests serve: its weights file is made here, before any guest boots."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def guest_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of 82 MB, of which a token uses 2 experts of 208: many pages to count, little to compute."""
    from tiny_models import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("guests") / "mixtral-82mb",
        "mixtral",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_local_experts=208,
        dtype="bfloat16",
    )
