from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def ask() -> ModuleType:
    path = Path(__file__).parents[3] / "scripts" / "ask.py"
    spec = importlib.util.spec_from_file_location("ask", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def silent_address() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_waiting_ends_when_the_server_has_died(
    ask: ModuleType, silent_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "ATTEMPT_SECONDS", 0.1)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with pytest.raises(RuntimeError, match=rf"pid {dead.pid}\) ended before it was ready"):
        ask.wait_until_serving(silent_address, dead.pid, timeout=300)


def test_waiting_ends_at_the_deadline(
    ask: ModuleType, silent_address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ask, "ATTEMPT_SECONDS", 0.1)
    arguments = ["hello", "--address", silent_address, "--timeout", "0.1", "--server-pid", str(os.getpid())]
    assert ask.main(arguments) == 1
    assert f"{silent_address} does not serve after 0.1 s" in capsys.readouterr().err
