import pytest

from placement.sizes import format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("2G", 2 << 30),
        ("2g", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("500MB", 500_000_000),
        (" 4 KiB ", 4096),
        ("7B", 7),
    ],
)
def test_parse(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "1GiBB", "1 2", "0x10", "nan", "1Ki B"])
def test_what_cannot_be_read_is_named(text):
    with pytest.raises(ValueError, match="cannot read the size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (7, "7 B"),
        (12 << 10, "12 KiB"),
        (3 << 29, "1.5 GiB"),
        (270 << 20, "270 MiB"),
        (0, "0 B"),
        (1 << 40, "1 TiB"),
    ],
)
def test_format(count, text):
    assert format_bytes(count) == text
