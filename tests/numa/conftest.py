"""The guests of a session, and the model that they serve: its weights file is made here, before any guest boots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from guests import Guest, compile_sources, run_in_guest

# Much of what a guest does keeps one CPU busy, and a continuous integration machine has two or more.
AT_ONCE = 2


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


@pytest.fixture(scope="session")
def boot(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, guest_model: Path
) -> Iterator[Callable[[Guest], dict[str, Any]]]:
    """The facts of a guest. All guests that this session's tests name as GUEST boot at once, the longest first."""
    wanted = {item.module.GUEST for item in request.session.items if hasattr(item.module, "GUEST")}  # type: ignore[attr-defined]
    compile_sources()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {}
        for guest in sorted(wanted, key=lambda guest: guest.timeout, reverse=True):
            models = [request.getfixturevalue("demo_model"), guest_model] if guest.demo else [guest_model]
            running[guest] = pool.submit(run_in_guest, guest, tmp_path_factory.mktemp(guest.name), models)

        def facts_of(guest: Guest) -> dict[str, Any]:
            facts, said = running[guest].result()
            # A scenario that is not among the facts fails its tests; here it is said how far the guest came.
            print(said)
            return facts

        yield facts_of
