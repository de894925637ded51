"""Which backend serves, and what it asks of the weights' layout."""

import argparse
import logging
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from service import backends
from service.backends import choose_backend
from service.cli.model_flags import add_weight_flags, backend_from
from service.cli.placement_flags import add_placement_flags
from service.loader.model_size import measure
from service.models.packing import Quantization, parse_quantization


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "why_unusable", lambda: "native CPU kernels were not built")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "why_unusable", lambda: None)


@pytest.mark.usefixtures("kernels")
def test_the_kernels_serve_where_they_are() -> None:
    assert [choose_backend(asked) for asked in ("auto", "cpu", "torch")] == ["cpu", "cpu", "torch"]


@pytest.mark.usefixtures("no_kernels")
def test_without_them_torch_serves_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_backend("auto") == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "native CPU kernels were not built; the torch backend serves, which is slower"
    ]
    with pytest.raises(ValueError, match="--backend cpu: native CPU kernels were not built"):
        choose_backend("cpu")


@pytest.mark.usefixtures("no_kernels")
def test_integers_need_the_kernels() -> None:
    with pytest.raises(ValueError, match=r"--quantize int8: only the cpu backend .* were not built"):
        choose_backend("auto", Quantization("int8", 0))


@pytest.mark.usefixtures("kernels")
def test_integers_and_torch_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"--quantize int4: only the cpu backend has integer weights$"):
        choose_backend("torch", Quantization("int4", 32))


@pytest.mark.parametrize(
    ("name", "group", "expected"),
    [
        (None, None, None),
        ("none", None, None),
        ("int8", None, Quantization("int8", 0)),
        ("int8", 64, Quantization("int8", 64)),
        ("int4", None, Quantization("int4", 32)),
        ("int4", 0, Quantization("int4", 0)),
    ],
)
def test_quantize_flags(name: str | None, group: int | None, expected: Quantization | None) -> None:
    assert parse_quantization(name, group) == expected


@pytest.mark.parametrize(("name", "group"), [(None, 32), ("none", 2), ("int8", -2), ("int4", 31)])
def test_bad_group_sizes_name_the_flag(name: str | None, group: int) -> None:
    with pytest.raises(ValueError, match="--quantize-group-size"):
        parse_quantization(name, group)


def test_sizes_for_the_plan_are_those_of_the_layout(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16")
    rows = measure(model_dir)
    panels = measure(model_dir, backend="cpu")
    int8, int4 = (
        measure(model_dir, backend="cpu", quantization=parse_quantization(name, None))
        for name in ("int8", "int4")
    )
    assert rows.weights_bytes <= panels.weights_bytes < 1.1 * rows.weights_bytes
    assert 0.5 * rows.weights_bytes < int8.weights_bytes < 0.6 * rows.weights_bytes
    assert int4.weights_bytes < int8.weights_bytes
    assert rows.kv_bytes_per_token == int8.kv_bytes_per_token


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_weight_flags(parser)
    add_placement_flags(parser)
    return parser.parse_args(words)


@pytest.mark.usefixtures("kernels")
def test_files_as_they_are_need_torch() -> None:
    assert backend_from(flags("--placement=shared")) == ("torch", None)
    with pytest.raises(ValueError, match=r"--backend cpu: .* --placement shared"):
        backend_from(flags("--placement=shared", "--backend=cpu"))
    with pytest.raises(ValueError, match="--quantize int8"):
        backend_from(flags("--placement=shared", "--quantize=int8"))
