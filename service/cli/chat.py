"""`numaserve chat`: a conversation with a running server, in the terminal or from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from numaserve import Client

HELP = "/reset forgets all, /system TEXT sets the system message, /quit leaves; Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `numaserve chat`."""
    parser.add_argument(
        "--address", default="localhost:50051", help="server to talk to (default: %(default)s)"
    )
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="system message that opens the conversation"
    )
    parser.add_argument("--max-tokens", type=int, default=None, help="longest answer, in tokens")
    parser.add_argument(
        "--temperature", type=float, default=None, help="0 is greedy (default: the model's own)"
    )
    parser.add_argument("--seed", type=int, default=None, help="seed of the random numbers")
    parser.add_argument(
        "--connect-timeout", type=float, default=10.0, metavar="SECONDS", help="wait so long for the server"
    )


def run(args: argparse.Namespace) -> int:
    """Talk until /quit or the end of the input; returns the exit status."""
    from numaserve import Client, InferenceError

    with Client(args.address) as client:
        try:
            client.wait_until_serving(args.connect_timeout)
            info = client.model_info()
        except InferenceError as error:
            print(f"numaserve chat: no server answers at {args.address}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        chat = Chat(client, info.has_chat_template, args)
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{info.model} at {args.address}. {HELP}.")
            if not info.has_chat_template:
                print("This model has no chat template: each line is continued as it stands.")
        return chat.talk(_lines(sys.stdin, interactive), interactive)


@dataclass
class Chat:
    """A conversation; without `has_template` every line is a prompt of its own."""

    client: Client
    has_template: bool
    args: argparse.Namespace
    history: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset(self.args.system)

    def reset(self, system: str) -> None:
        """Forget all but the system message, which is `system` from now on."""
        self.system = system
        self.history = [("system", system)] if system else []

    def talk(self, lines: Iterator[str], interactive: bool) -> int:
        """Answer each line; a failed call ends a piped conversation with 1, an interactive one goes on."""
        from numaserve import InferenceError

        for line in lines:
            text = line.strip()
            if text == "/quit":
                break
            if self._command(text) or not text:
                continue
            try:
                self.answer(text)
            except InferenceError as error:
                print(f"numaserve chat: {error}", file=sys.stderr)
                if not interactive:
                    return 1
        return 0

    def answer(self, text: str) -> None:
        """Print the answer to `text` as it comes; Ctrl-C ends it and keeps what has come."""
        asked = len(self.history)
        self.history.append(("user", text))
        parts: list[str] = []
        finished = False
        stream = self.client.stream(
            prompt=None if self.has_template else text,
            messages=self.history if self.has_template else None,
            max_tokens=self.args.max_tokens,
            temperature=self.args.temperature,
            seed=self.args.seed,
        )
        try:
            for part in stream:
                parts.append(part.text)
                print(part.text, end="", flush=True)
            finished = True
        except KeyboardInterrupt:
            finished = True
            print(" [stopped]", end="")
        finally:
            stream.close()
            if parts:
                print(flush=True)
            if finished:
                self.history.append(("assistant", "".join(parts)))
            else:
                del self.history[asked:]

    def _command(self, text: str) -> bool:
        """Carry out a line that is a command; returns whether it was one."""
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self.reset(self.system)
        elif name == "/system":
            self.reset(rest.strip())
        elif name in ("/help", "/?"):
            print(HELP)
        else:
            return False
        return True


def _lines(stdin: TextIO, interactive: bool) -> Iterator[str]:
    """Lines of the input; at a terminal with a prompt, line editing, and Ctrl-C that clears the line."""
    if not interactive:
        yield from stdin
        return
    with contextlib.suppress(ImportError):
        # The import alone gives input() its history and editing keys.
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
