import argparse
from dataclasses import dataclass

import pytest

from placement.plan import PlanRequest
from service.cli.placement_flags import add_placement_flags, plan_request_from


@dataclass(frozen=True)
class Sizes:
    weights_bytes: int = 1000
    kv_block_bytes: int = 64
    context_length: int = 100
    shared_obstacle: str = "no"


def request(*words, max_model_len=0):
    parser = argparse.ArgumentParser()
    add_placement_flags(parser)
    args = parser.parse_args(words)
    args.block_size, args.max_model_len = 16, max_model_len
    return plan_request_from(args, Sizes())


def test_defaults():
    assert request() == PlanRequest(
        weights_bytes=1000, kv_block_bytes=64, min_kv_blocks=7, shared_obstacle="no"
    )


def test_every_flag_reaches_the_request():
    long = request(
        "--nodes=0", "--cpunodebind=1", "--membind=2", "--interleave=3", "--physcpubind=4", "--workers-per-node=5",
        "--threads-per-worker=6", "--placement=shared", "--kv-cache-memory=7KiB",
    )  # fmt: skip
    assert (long.nodes, long.cpunodebind, long.membind, long.interleave, long.physcpubind) == tuple("01234")
    assert (long.workers_per_node, long.threads_per_worker, long.placement) == (5, 6, "shared")
    assert long.kv_cache_bytes == 7168
    assert request("--workers=3").workers == 3


def test_numactl_short_flags():
    short = request("-N", "!0", "-m", "+0", "-i", "all", "-C", "0-6:2")
    assert (short.cpunodebind, short.membind, short.interleave, short.physcpubind) == (
        "!0",
        "+0",
        "all",
        "0-6:2",
    )


def test_a_shorter_context_needs_fewer_blocks():
    assert request(max_model_len=33).min_kv_blocks == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--kv-cache-memory", "lots"), "cannot read the size 'lots'"),
        (("--placement", "scatter"), "--placement"),
        (("--workers", "2", "--workers-per-node", "2"), "--workers-per-node"),
        (("--workers-per-node", "x"), "--workers-per-node"),
    ],
)
def test_bad_flags_are_usage_errors_that_name_them(capsys, words, named):
    with pytest.raises(SystemExit) as caught:
        request(*words)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err
