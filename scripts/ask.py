"""Waits until a server serves, asks it one question and prints the answer while it is made."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from numaserve import Client, InferenceError

# A new connection is tried so often, so that gRPC's growing pauses between attempts play no part.
ATTEMPT_SECONDS = 2.0


def is_alive(pid: int) -> bool:
    """Whether the process runs, be it ours or not; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_serving(address: str, server_pid: int | None, timeout: float) -> None:
    """Return once the server's health service answers SERVING.

    Raises RuntimeError when `server_pid` ends before that, or after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            with Client(address) as client:
                client.wait_until_serving(ATTEMPT_SECONDS)
            return
        except InferenceError as error:
            if server_pid is not None and not is_alive(server_pid):
                raise RuntimeError(f"the server (pid {server_pid}) ended before it was ready") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"{address} does not serve after {timeout:g} s: {error}") from None


def ask(address: str, question: str, max_tokens: int) -> None:
    """Print the question, the answer as it streams in, and what it took."""
    print(f"> {question}\n", flush=True)
    parts = []
    with Client(address, timeout=300) as client:
        messages = [{"role": "user", "content": question}]
        for part in client.stream(messages=messages, max_tokens=max_tokens, temperature=0):
            print(part.text, end="", flush=True)
            parts.append(part)
    end = parts[-1]
    print(
        f"\n\n[{end.usage.completion_tokens} tokens in {len(parts)} parts, first after "
        f"{end.timings.first_token_ms:.0f} ms, all after {end.timings.total_ms:.0f} ms; "
        f"by worker {end.served_by.worker} (pid {end.served_by.pid}) on {end.served_by.unit}]"
    )


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--address", default="127.0.0.1:50051", help="of the server (default: %(default)s)")
    parser.add_argument("--server-pid", type=int, metavar="PID", help="stop waiting when this process ends")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS", help="(default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        wait_until_serving(arguments.address, arguments.server_pid, arguments.timeout)
        ask(arguments.address, arguments.question, arguments.max_tokens)
    except (RuntimeError, InferenceError) as error:
        print(f"ask: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
