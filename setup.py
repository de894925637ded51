"""Build hook: generates the gRPC stubs in numaserve/v1 from protos/ whenever the package is built."""

import importlib.resources
from pathlib import Path

from setuptools import setup
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


class BuildWithStubs(build_py):
    """`build_py` that generates the stubs first, in the source tree, so that editable installs find them too."""

    def run(self) -> None:
        (ROOT / "numaserve" / "v1").mkdir(exist_ok=True)
        generate_stubs(ROOT)
        # The package list was made before the stubs existed on a fresh checkout.
        if "numaserve.v1" not in (self.packages or []):
            self.packages = [*(self.packages or []), "numaserve.v1"]
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
