"""Fixtures for all tests; puts this folder on the import path, so that helper modules are found by name."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in Hugging Face layout with a tokenizer, small enough to serve in a second."""
    from tiny_models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module", params=["torch", "cpu"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs what uses it once with each backend, by way of `decoder_harness`."""
    import decoder_harness

    from service.kernels import build

    if request.param == "cpu" and not build.is_current():
        build.build()
    before, decoder_harness.BACKEND = decoder_harness.BACKEND, request.param
    yield request.param
    decoder_harness.BACKEND = before


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, converted from its published GGUF file and cached."""
    from service.demo.model import make_demo_model

    return make_demo_model()
