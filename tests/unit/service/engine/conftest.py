import pytest

from service.engine.picker import KernelPicker, Picker, ReferencePicker
from service.kernels import build
from service.kernels.library import KernelLibrary, KernelPool


@pytest.fixture(scope="session")
def kernel_picker() -> KernelPicker:
    if not build.is_current():
        build.build()
    return KernelPicker(KernelPool(KernelLibrary(build.LIBRARY), threads=2))


@pytest.fixture(params=["reference", "kernel"])
def picker(request: pytest.FixtureRequest) -> Picker:
    """Runs what uses it once with numpy and torch and once with the kernel."""
    if request.param == "reference":
        return ReferencePicker()
    kernel: KernelPicker = request.getfixturevalue("kernel_picker")
    return kernel
