"""What scripts/bench_cpu compares: a server of ours over gRPC, and other programs in processes of their own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench_server import RunningServer, running_server

from numaserve import AsyncClient


@dataclass(frozen=True)
class Run:
    """One measurement of `streams` sequences: seconds until all had their first token, and what followed.

    `decode_rate` is tokens per second while all of them were generating.
    """

    streams: int
    prefill_s: float
    decode_rate: float
    answers: list[list[int]]


class Subject(Protocol):
    """Something to measure."""

    name: str

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Run:
        """Answers prompts of one length together, greedily, with `new_tokens` tokens each."""

    def close(self) -> None:
        """Ends its processes."""


class Server:
    """`numaserve serve` with one worker; every request goes over gRPC, in a stream of its own on one connection."""

    def __init__(self, name: str, model: Path, threads: int, arguments: Sequence[str]) -> None:
        self.name = name
        self._stack = ExitStack()
        # Equal prompts would otherwise be computed once.
        flags = ["--workers=1", f"--threads-per-worker={threads}", "--no-prefix-caching", *arguments]
        self.server: RunningServer = self._stack.enter_context(running_server(model, flags, 300))
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._client: AsyncClient = self._runner.run(self._connect())
        self._stack.callback(lambda: self._runner.run(self._client.close()))

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Run:
        """See Subject. Each part of an answer counts from when the client has it."""
        return self._runner.run(self._generate(prompts, new_tokens))

    def score(self, windows: list[list[int]]) -> tuple[float, int]:
        """The sum of -log p of every token of the windows but the first of each, and how many those are."""
        return self._runner.run(self._score(windows))

    def close(self) -> None:
        """Stops the server; does nothing where it was stopped."""
        self._stack.close()

    async def _connect(self) -> AsyncClient:
        client = AsyncClient(self.server.address, timeout=1200)
        await client.wait_until_serving(60)
        return client

    async def _generate(self, prompts: list[list[int]], new_tokens: int) -> Run:
        began = time.perf_counter()
        streams = await asyncio.gather(*(self._stream(prompt, new_tokens) for prompt in prompts))
        first = max(parts[0][0] for parts in streams)
        last = min(parts[-1][0] for parts in streams)
        between = [count for parts in streams for at, count, _ in parts if first < at <= last]
        if new_tokens > 1 and not between:
            raise RuntimeError(
                f"{self.name}: no moment when all {len(prompts)} streams generated; ask for more"
            )
        rate = sum(between) / (last - first) if between else 0.0
        answers = [[token for _, _, tokens in parts for token in tokens] for parts in streams]
        return Run(len(prompts), first - began, rate, answers)

    async def _stream(self, prompt: list[int], new_tokens: int) -> list[tuple[float, int, list[int]]]:
        parts = []
        stream = self._client.stream(
            prompt_token_ids=prompt, max_tokens=new_tokens, ignore_eos=True, temperature=0
        )
        async for part in stream:
            if part.token_ids:
                parts.append((time.perf_counter(), len(part.token_ids), list(part.token_ids)))
        return parts

    async def _score(self, windows: list[list[int]]) -> tuple[float, int]:
        total, count = 0.0, 0
        for window in windows:
            answer = await self._client.infer(prompt_token_ids=window, max_tokens=1, prompt_logprobs=0)
            known = [each.chosen.logprob for each in answer.prompt_logprobs[1:]]
            total -= sum(known)
            count += len(known)
        return total, count


class Peer:
    """Another program that answers requests line by line, as scripts/llama_peer.py does."""

    def __init__(self, name: str, command: Sequence[str | Path]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(each) for each in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.version: str = self._read()["version"]

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Run:
        """See Subject."""
        answer = self._ask(call="generate", prompts=prompts, new_tokens=new_tokens)
        steps = answer["steps_s"]
        rate = len(prompts) * len(steps) / sum(steps) if steps else 0.0
        return Run(len(prompts), answer["prefill_s"], rate, answer["answers"])

    def score(self, windows: list[list[int]]) -> tuple[float, int]:
        """As Server.score."""
        answer = self._ask(call="score", windows=windows)
        return answer["nll"], answer["tokens"]

    def close(self) -> None:
        """Ends the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
