"""Loading, refusals, and the pool's life."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from service.kernels import build, library, operations
from service.kernels.library import KernelError, KernelLibrary, KernelPool
from service.kernels.packed import PackedWeight

Operation = operations.Operation


def test_without_a_build_it_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert library.load(tmp_path / "absent.so") is None
        assert library.load(tmp_path / "absent.so") is None
    assert [record.message for record in caplog.records if "not built" in record.message] == [
        "native CPU kernels were not built (python -m service.kernels.build); using torch's"
    ]


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(b"no ELF")
    assert library.load(path) is None
    assert "cannot be loaded" in caplog.text


def test_without_a_compiler_the_build_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build.main(["--output", str(tmp_path / "kernels.so")]) == 1
    assert "install g++ or clang++" in capsys.readouterr().err
    assert not (tmp_path / "kernels.so").exists()


def test_a_compiler_that_fails_leaves_the_old_library(tmp_path: Path) -> None:
    target = tmp_path / "kernels.so"
    target.write_text("old")
    with pytest.raises(build.BuildError, match="false"):
        build.build(target, compiler="false")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_other_architectures_get_the_portable_kernels_alone() -> None:
    assert build.supported_sets("true", "aarch64") == []
    assert [each.source for each in build.supported_sets("true", "x86_64")] == [
        "isa_avx2.cpp",
        "isa_avx512.cpp",
        "isa_amx.cpp",
    ]


def test_instruction_set_from_the_environment(
    kernel_library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "generic")
    assert KernelPool(kernel_library).isa == "generic"
    monkeypatch.setenv(library.ISA_VARIABLE, "mmx")
    with pytest.raises(KernelError, match="mmx"):
        KernelPool(kernel_library)


def test_best_instruction_set_is_chosen(
    kernel_library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(library.ISA_VARIABLE, raising=False)
    best = next(isa for isa in ("amx", "avx512", "avx2", "generic") if kernel_library.supports(isa))
    assert KernelPool(kernel_library).isa == best


def in_a_child(work: Callable[[], bool]) -> bool:
    """What `work` returns in a forked process, which it may leave in any state; False where it raises."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def thread_ids() -> set[int]:
    return {int(thread) for thread in os.listdir("/proc/self/task")}


def test_threads_are_pinned(kernel_library: KernelLibrary) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cpus = [allowed[0], allowed[-1]]

    def pinned_as_asked() -> bool:
        # Other libraries may start threads of their own in a forked process.
        others = thread_ids() - {threading.get_native_id()}
        pool = KernelPool(kernel_library, cpus=cpus)
        pool.pin_caller()
        threads = [os.sched_getaffinity(thread) for thread in sorted(thread_ids() - others)]
        return (pool.threads, pool.pinned) == (2, 1) and [{cpus[0]}, {cpus[1]}] == threads

    assert in_a_child(pinned_as_asked)


def test_cpus_that_are_not_there_leave_threads_unpinned(kernel_library: KernelLibrary) -> None:
    pool = KernelPool(kernel_library, cpus=[1 << 19, 1 << 19])
    assert pool.pinned == 0
    with pytest.raises(KernelError, match="CPU 524288"):
        pool.pin_caller()
    out = torch.empty(2, 16)
    pool.run(operations.add(torch.ones(2, 16), torch.ones(2, 16), out))
    assert (out == 2).all()


@pytest.mark.parametrize(("options", "problem"), [({"threads": 5000}, "threads"), ({"cpus": [-1]}, "cpus")])
def test_pools_that_cannot_be(kernel_library: KernelLibrary, options: dict, problem: str) -> None:
    with pytest.raises(KernelError, match=problem):
        KernelPool(kernel_library, **options)


def test_a_pool_is_refused_after_a_fork(kernel_library: KernelLibrary) -> None:
    pool = KernelPool(kernel_library, threads=2)
    work = operations.add(torch.ones(1, 1), torch.ones(1, 1), torch.empty(1, 1))

    def refused() -> bool:
        try:
            pool.run(work)
        except KernelError as error:
            return "fork" in str(error)
        return False

    assert in_a_child(refused)
    pool.run(work)


def test_closing_ends_the_threads(kernel_library: KernelLibrary) -> None:
    before = thread_ids()
    pool = KernelPool(kernel_library, threads=4)
    own = thread_ids() - before
    assert len(own) == 3
    pool.close()
    assert not own & thread_ids()


F32 = torch.empty(4, 8)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda w: operations.linear(torch.empty(4, 9), w, F32), "x"),
        (lambda w: operations.linear(torch.empty(8, 4).T, w, F32), "x"),
        (lambda w: operations.linear(torch.empty(4, 8, dtype=torch.float64), w, F32), "x"),
        (lambda w: operations.linear(F32, w, torch.empty(3, 8)), "out"),
        (lambda w: operations.linear(F32, w, torch.empty(4, 8), bias=torch.empty(7)), "bias"),
        (lambda w: operations.linear(F32, w, torch.empty(4, 8), residual=torch.empty(4, 7)), "residual"),
        (lambda _: operations.rms_norm(F32, torch.empty(7), F32, 1e-6), "weight"),
        (
            lambda _: operations.rms_norm(F32, torch.empty(8), F32[:1], 1e-6, row_index=torch.tensor([4])),
            "row_index",
        ),
        (lambda _: operations.activation(F32, torch.empty(4, 5), "silu"), "x"),
        (lambda _: operations.activation(F32, torch.empty(4, 4), "swiglu"), "kind"),
        (lambda w: operations.embedding(torch.zeros(4, dtype=torch.int32), w, F32), "ids"),
        (lambda _: attention(query=torch.empty(1, 17)), "query"),
        (lambda _: attention(keys=torch.empty(2, 4, 1, 16, dtype=torch.float64)), "keys"),
        (lambda _: attention(tables=torch.zeros(1, 1, dtype=torch.int32)), "block_tables"),
        (lambda _: attention(sequences=[(0, 1, 9)]), "block_tables"),
        (lambda _: attention(sequences=[(0, 2, 2)]), "sequences"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    kernel_library: KernelLibrary, make: Callable[[PackedWeight], Operation], name: str
) -> None:
    weight = KernelPool(kernel_library).pack(torch.ones(8, 8))
    with pytest.raises(ValueError, match=rf"^{name}"):
        make(weight)


def attention(
    query: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    tables: torch.Tensor | None = None,
    sequences: list[tuple[int, int, int]] | None = None,
) -> Operation:
    query = torch.zeros(1, 16) if query is None else query
    keys = torch.zeros(2, 4, 1, 16) if keys is None else keys
    tables = torch.tensor([[0, 1]]) if tables is None else tables
    return operations.paged_attention(
        query, keys, keys, tables, sequences or [(0, 1, 5)], torch.empty_like(query), scale=1.0
    )


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: operations.embedding(torch.tensor([50]), torch.ones(50, 4), torch.empty(1, 4)), "ids: 50"),
        (lambda: operations.embedding(torch.tensor([-1]), torch.ones(50, 4), torch.empty(1, 4)), "ids: -1"),
        (lambda: attention(tables=torch.tensor([[0, 2]])), "block_tables: 2"),
        (lambda: attention(tables=torch.tensor([[-1, 0]])), "block_tables: -1"),
    ],
)
def test_numbers_that_point_nowhere_are_refused(
    kernel_library: KernelLibrary, make: Callable[[], Operation], problem: str
) -> None:
    good = operations.add(torch.ones(1, 1), torch.ones(1, 1), torch.empty(1, 1))
    with pytest.raises(KernelError, match=f"operation 1: {problem}"):
        KernelPool(kernel_library).run(good, make())


def test_slots_outside_the_cache_are_refused(kernel_library: KernelLibrary) -> None:
    cache = torch.zeros(2, 4, 1, 16)
    operation = operations.rotate_and_cache(
        torch.zeros(1, 48), torch.empty(1, 16), cache, cache, torch.tensor([8])
    )
    with pytest.raises(KernelError, match="slots: 8"):
        KernelPool(kernel_library).run(operation)


def test_packed_weight_needs_all_its_bytes(kernel_library: KernelLibrary) -> None:
    with pytest.raises(ValueError, match="packed weight"):
        KernelPool(kernel_library).pack(torch.ones(8, 8), out=torch.empty(3, dtype=torch.uint8))
