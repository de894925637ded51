import errno
import mmap

import pytest

from placement import numa
from placement.binding import bind_mapping, stripe_bytes
from placement.mapping import HUGE_PAGE, Mapping
from placement.plan import Policy

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def bound(monkeypatch):
    """The arguments of every mbind that would be made."""
    calls = []
    monkeypatch.setattr(numa, "mbind", lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize("length", [mmap.PAGESIZE, 3 * MIB + 4096, 82 * MIB, 5 * GIB, 140 * GIB + 4096])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 2, 5)])
def test_stripes_cover_a_mapping_once_and_evenly(bound, length, nodes):
    binding = bind_mapping(Mapping(1 << 40, length), nodes, Policy.INTERLEAVE)
    assert binding.errno == 0
    end, shares = 1 << 40, dict.fromkeys(nodes, 0)
    for address, size, mode, (node,) in bound:
        assert (address, mode) == (end, numa.MPOL_BIND)
        end += size
        shares[node] += size
    assert end == (1 << 40) + length
    assert len(bound) <= 4096
    if length > MIB:
        assert all(abs(share - length / len(nodes)) < 0.01 * length for share in shares.values())


@pytest.mark.parametrize("length", [GIB, 3 * GIB + 4096, 700 * GIB])
def test_stripes_of_large_mappings_are_whole_huge_pages(length):
    assert stripe_bytes(length) % HUGE_PAGE == 0


@pytest.mark.parametrize(
    ("policy", "nodes"),
    [(Policy.REPLICATE, (1,)), (Policy.REPLICATE, (0, 2)), (Policy.INTERLEAVE, (1,))],
)
def test_one_policy_is_enough_where_nothing_is_spread(bound, policy, nodes):
    bind_mapping(Mapping(1 << 40, GIB), nodes, policy)
    assert bound == [(1 << 40, GIB, numa.MPOL_BIND, nodes)]


@pytest.mark.parametrize("policy", [Policy.REPLICATE, Policy.INTERLEAVE])
def test_a_refusal_is_told_and_not_raised(policy):
    mapping = Mapping.anonymous(4 * MIB, "test")
    with numa.refusing(mbind=errno.EPERM):
        binding = bind_mapping(mapping, (0, 1), policy)
    mapping.close()
    assert binding.errno == errno.EPERM
    assert "mbind refused (EPERM" in str(binding)
