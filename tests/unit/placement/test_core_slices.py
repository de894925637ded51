import pytest

from placement.core_slices import slice_cores
from placement.topology import Cpu


def cores(count, threads=1, first=0):
    """`count` cores whose n-th threads are numbered `count` apart, as Linux numbers SMT siblings."""
    return [
        Cpu(first + core + thread * count, True, 0, 0, first + core, ())
        for thread in range(threads)
        for core in range(count)
    ]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 17, 64])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 64, 70])
def test_slices_are_disjoint_and_use_every_cpu_unless_workers_outnumber_cpus(count, threads, workers):
    cpus = cores(count, threads)
    slices = slice_cores(cpus, workers)
    used = [cpu for part in slices for cpu in part.cpus]
    assert len(slices) == workers
    assert all(part.cpus and 1 <= part.compute_threads <= part.physical_cores for part in slices)
    if workers <= len(cpus):
        assert sorted(used) == sorted(cpu.id for cpu in cpus)
        assert not any(part.shared for part in slices)
    else:
        assert set(used) == {cpu.id for cpu in cpus}
        assert all(part.shared for part in slices)
    sizes = [part.physical_cores for part in slices]
    if workers <= count:
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == count


def test_physical_cores_come_first_and_siblings_last():
    (whole,) = slice_cores(cores(4, threads=2), 1)
    assert whole.cpus == (0, 1, 2, 3, 4, 5, 6, 7)
    first, second = slice_cores(cores(4, threads=2), 2)
    assert (first.cpus, second.cpus) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_a_core_of_which_only_the_sibling_may_be_used_still_counts():
    slices = slice_cores([Cpu(0, True, 0, 0, 0, ()), Cpu(9, True, 0, 0, 1, ())], 2)
    assert [(part.cpus, part.physical_cores) for part in slices] == [((0,), 1), ((9,), 1)]


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (17, 16), (64, 63)])
def test_one_core_is_left_to_the_event_loop_from_four_on(count, threads):
    assert slice_cores(cores(count), 1)[0].compute_threads == threads


@pytest.mark.parametrize(("count", "workers"), [(0, 1), (4, 0)])
def test_nothing_to_divide_is_an_error(count, workers):
    with pytest.raises(ValueError, match="cannot divide"):
        slice_cores(cores(count), workers)
