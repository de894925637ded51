import random

import pytest

from placement.cpulist import ListError, format_list, parse_kernel_list, parse_numactl_list


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("\n", ()),
        ("0", (0,)),
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        ("8,0-1,1-2", (0, 1, 2, 8)),
        ("0-11:2/4", (0, 1, 4, 5, 8, 9)),
        ("64", (64,)),
    ],
)
def test_kernel_list(text, expected):
    assert parse_kernel_list(text) == expected


def test_format_is_the_inverse_of_parse_for_random_sets():
    generator = random.Random(7)
    for _ in range(200):
        ids = tuple(sorted(generator.sample(range(300), generator.randrange(0, 60))))
        text = format_list(ids)
        assert parse_kernel_list(text) == ids
        assert not ids or parse_numactl_list(text, "--nodes", range(300)) == ids


def test_format_joins_runs_and_keeps_pairs_as_the_kernel_does():
    assert format_list([3, 0, 1, 2, 8, 10, 11]) == "0-3,8,10-11"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0,2-3", (0, 2, 3)),
        ("all", (0, 2, 3, 5)),
        ("!0", (2, 3, 5)),
        ("!2-3", (0, 5)),
        ("!all", ()),
        ("+0", (2,)),
        ("+0-1", (2, 3)),
        ("+all", (2, 3)),
        ("!+0", (0, 3, 5)),
        ("0-6:2", (0, 2, 4, 6)),
        (" 0 , 2 ", (0, 2)),
        ("7", (7,)),
    ],
)
def test_numactl_list(text, expected):
    assert parse_numactl_list(text, "--nodes", (0, 2, 3, 5), relative_to=(2, 3)) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty list"),
        ("!", "empty list"),
        ("0,", "''"),
        ("0,,1", "''"),
        ("a", "'a'"),
        ("0,x-3", "'x-3'"),
        ("-1", "'-1'"),
        ("3-1", "'3-1'"),
        ("0-3:0", "'0-3:0'"),
        ("99999999", "'99999999'"),
        ("+2", "+2"),
        ("0x1", "'0x1'"),
        ("1-2-3", "'1-2-3'"),
        ("same", "'same'"),
    ],
)
def test_errors_name_the_flag_and_the_bad_part(text, part):
    with pytest.raises(ListError) as caught:
        parse_numactl_list(text, "--membind", (0, 1), relative_to=(0, 1))
    assert caught.value.subject == "--membind"
    assert part in caught.value.reason
    assert str(caught.value).startswith("--membind: ")
