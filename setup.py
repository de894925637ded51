"""Build hooks: the gRPC stubs in numaserve/v1 from protos/, and the native CPU kernels where there is a C++ compiler."""

import importlib.resources
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTOS = ROOT / "protos"


def generate_stubs(destination: Path) -> None:
    """Run protoc over every .proto file, writing `numaserve/v1/*_pb2.py`, `.pyi` and `_grpc.py`."""
    from grpc_tools import protoc

    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={well_known}",
            f"--python_out={destination}",
            f"--pyi_out={destination}",
            f"--grpc_python_out={destination}",
            *files,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status} on {', '.join(files)}")
    (destination / "numaserve" / "v1" / "__init__.py").write_text(
        '"""Generated from protos/numaserve/v1."""\n'
    )


def build_kernels() -> None:
    """Compile service/kernels; without a compiler the torch backend serves, which `numaserve serve` says."""
    sys.path.insert(0, str(ROOT))
    from service.kernels import build

    if build.is_current():
        return
    try:
        build.build()
    except build.BuildError as error:
        print(f"warning: the native CPU kernels were not built: {error}", file=sys.stderr)


class BuildAll(build_py):
    """`build_py` that generates and compiles first, in the source tree, so that editable installs find it all too."""

    def run(self) -> None:
        build_kernels()
        (ROOT / "numaserve" / "v1").mkdir(exist_ok=True)
        generate_stubs(ROOT)
        # The package list was made before the stubs existed on a fresh checkout.
        if "numaserve.v1" not in (self.packages or []):
            self.packages = [*(self.packages or []), "numaserve.v1"]
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python 3: the kernels know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """Holds a compiled library, which is no extension module of Python's."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildAll, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
