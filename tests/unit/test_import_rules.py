"""Who may import whom. Checked twice: in the sources, and by what a fresh interpreter has loaded afterwards."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported_packages(path: Path) -> set[str]:
    """Top-level names that a file imports, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no sources"
    return files


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("placement", {"service", "numaserve", "torch", "grpc", "numpy"}),
        ("numaserve", {"service", "placement", "torch", "numpy"}),
    ],
)
def test_no_source_of_a_package_imports_what_it_must_not(package: str, forbidden: set[str]) -> None:
    offenders = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in sources(package)
        if (found := imported_packages(path) & forbidden)
    }
    assert offenders == {}


# Within service, imports run one way: what stands left may import what stands right of it, never the reverse.
LAYERS = ["cli", "worker", "servicers", "engine", "models", "ops"]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_inside_service_run_one_way(layer: str) -> None:
    above = LAYERS[: LAYERS.index(layer)]
    package = ROOT / "service" / layer
    files = (
        [package.with_suffix(".py")] if package.with_suffix(".py").exists() else sorted(package.rglob("*.py"))
    )
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("service."):
                assert node.module.split(".")[1] not in above, f"{path.name} imports {node.module}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import placement.launcher, service.cli.serve", {"torch", "grpc", "numpy"}),
        ("import service.cli.main; service.cli.main.build_parser()", {"torch", "grpc", "numpy"}),
        (
            "import numaserve; numaserve.Client; numaserve.AsyncClient",
            {"torch", "numpy", "service", "placement"},
        ),
        ("import numaserve.v1.inference_pb2_grpc", {"torch", "numpy", "service", "placement"}),
        ("import service.control", {"torch"}),
    ],
)
def test_importing_leaves_heavy_modules_out(statement: str, absent: set[str]) -> None:
    code = f"import sys\n{statement}\nprint(*sorted({absent!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == []
