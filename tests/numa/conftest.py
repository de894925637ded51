"""The model that guests serve: its weights file is made here, before any guest boots."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def guest_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose weights take 78 MB, so that there are pages to count."""
    from tiny_models import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("guests") / "llama-78mb",
        hidden_size=512,
        intermediate_size=3072,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        dtype="bfloat16",
    )
