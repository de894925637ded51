from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from service.kernels import build
from service.kernels.library import KernelLibrary, KernelPool

_CPU_FLAGS = set(Path("/proc/cpuinfo").read_text().split())
_NEEDED = {
    "generic": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512bw", "avx512dq"},
    "amx": {"amx_bf16"},
}
# Those of this machine: every one of them is tested, and the library has to agree that it can run them.
ISAS = [isa for isa, flags in _NEEDED.items() if flags <= _CPU_FLAGS]


@pytest.fixture(scope="session")
def kernel_library() -> KernelLibrary:
    if not build.is_current():
        build.build()
    return KernelLibrary(build.LIBRARY)


@pytest.fixture(scope="session")
def make_pool(kernel_library: KernelLibrary) -> Callable[[str, int], KernelPool]:
    """Pools by instruction set and number of threads, made once."""
    pools: dict[tuple[str, int], KernelPool] = {}

    def make(isa: str, threads: int) -> KernelPool:
        if (isa, threads) not in pools:
            pools[isa, threads] = KernelPool(kernel_library, threads=threads, isa=isa)
        return pools[isa, threads]

    return make


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pool(isa: str, make_pool: Callable[[str, int], KernelPool]) -> KernelPool:
    return make_pool(isa, 2)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.fixture(scope="session")
def kernel_isas(kernel_library: KernelLibrary) -> list[str]:
    """The instruction sets of this machine."""
    return [isa for isa in ISAS if kernel_library.supports(isa)]


@pytest.fixture(scope="session")
def kernel_library_pool(kernel_library: KernelLibrary) -> KernelPool:
    """The calling thread alone, with the best instruction set."""
    return KernelPool(kernel_library, threads=1)
