"""Text that is at hand everywhere: the documentation strings of Python's standard library, as token ids."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from service.text.tokenizer import Tokenizer

# Modules with much prose, in one order, so that the text differs only between versions of Python.
MODULES = (
    *(
        "argparse",
        "asyncio",
        "ast",
        "collections",
        "configparser",
        "contextlib",
        "csv",
        "datetime",
        "decimal",
    ),
    *(
        "difflib",
        "doctest",
        "email.message",
        "enum",
        "fractions",
        "functools",
        "heapq",
        "http.client",
        "inspect",
    ),
    *("itertools", "json", "logging", "mailbox", "optparse", "os", "pathlib", "pickle", "platform", "random"),
    *(
        "re",
        "shutil",
        "smtplib",
        "socket",
        "sqlite3",
        "statistics",
        "string",
        "struct",
        "subprocess",
        "tarfile",
    ),
    *("tempfile", "textwrap", "threading", "typing", "unittest", "urllib.request", "uuid", "zipfile"),
)


def documentation() -> str:
    """The documentation of the modules, their classes and functions, and the classes' own functions."""
    return "\n\n".join(text for name in MODULES for text in _documentation_of(importlib.import_module(name)))


def _documentation_of(owner: object, depth: int = 2) -> Iterator[str]:
    text = getattr(owner, "__doc__", None)
    if isinstance(text, str) and len(text) > 80:
        yield inspect.cleandoc(text)
    if depth == 0:
        return
    for name, member in sorted(vars(owner).items()):
        is_own = inspect.isclass(member) or inspect.isroutine(member)
        if is_own and not name.startswith("_") and not inspect.ismodule(member):
            yield from _documentation_of(member, depth - 1 if inspect.isclass(member) else 0)


class Prompts:
    """Pieces of that text, no piece handed out twice before the end is reached."""

    def __init__(self, model: Path) -> None:
        self._tokens = Tokenizer.from_dir(model).encode(documentation(), add_special_tokens=False)
        self._next = 0

    def take(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` tokens; raises ValueError for more than the text holds."""
        if length > len(self._tokens):
            raise ValueError(f"the text has {len(self._tokens)} tokens, a prompt cannot have {length}")
        prompts = []
        for _ in range(count):
            if self._next + length > len(self._tokens):
                # Other beginnings than last time.
                self._next = (self._next + 1) % 64
            prompts.append(self._tokens[self._next : self._next + length])
            self._next += length
        return prompts

    def windows(self, tokens: int, length: int) -> list[list[int]]:
        """The text's first tokens in windows of `length`."""
        return [self._tokens[start : start + length] for start in range(0, tokens, length)]
