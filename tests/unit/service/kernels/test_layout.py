"""The sizes that are planned without the library are those that the library asks for."""

from pathlib import Path

import pytest

from service.kernels.layout import FORMATS, packed_bytes, why_unusable
from service.kernels.library import KernelLibrary


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group", [0, 16, 32, 128])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 2), (17, 31), (48, 576), (100, 129), (33, 4096)])
def test_sizes_agree(kernel_library: KernelLibrary, format: str, group: int, rows: int, columns: int) -> None:
    assert packed_bytes(format, rows, columns, group) == kernel_library.packed_bytes(
        format, rows, columns, group if format in ("int8", "int4") else 0
    )


@pytest.mark.parametrize(("format", "group", "word"), [("int5", 0, "format"), ("int8", 3, "group")])
def test_nonsense_is_refused(format: str, group: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        packed_bytes(format, 16, 16, group)


@pytest.mark.usefixtures("kernel_library")
def test_why_a_library_cannot_be_used_is_said(tmp_path: Path) -> None:
    assert why_unusable() is None
    assert "were not built" in (why_unusable(tmp_path / "absent.so") or "")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF")
    assert "cannot be loaded" in (why_unusable(broken) or "")
