"""A model whose answers show any wrong block, a tokenizer of one letter per token, and engines of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from service.engine.engine import Engine, EngineConfig
from service.engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from service.models.batch import ForwardBatch, PagedKVCache, nothing

VOCAB = 64
EOS = 63


class HashModel:
    """Its logits follow from all tokens and positions before, read back through the block table.

    Keys hold token ids and values positions, so a block that was lost, shared wrongly or written by another
    sequence gives other tokens, and a position that is not its own raises.
    """

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []
        self.fail_at_step: int | None = None

    def forward(
        self, batch: ForwardBatch, cache: PagedKVCache, before_computing: Callable[[], None] = nothing
    ) -> torch.Tensor:
        before_computing()
        self.batches.append(batch)
        if self.fail_at_step is not None and len(self.batches) >= self.fail_at_step:
            raise RuntimeError("the model broke")
        keys, values = cache.keys.view(-1), cache.values.view(-1)
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping), "two rows share a slot"
        keys[batch.slot_mapping] = batch.token_ids
        values[batch.slot_mapping] = batch.positions
        wanted = {row: place for place, row in enumerate(batch.logit_rows.tolist())}
        logits = torch.empty(len(wanted), VOCAB)
        row = 0
        for number, part in enumerate(batch.sequences):
            assert part.query_start == row
            row += part.query_length
            places = torch.arange(part.context_length)
            slots = batch.block_tables[number][places // cache.block_size] * cache.block_size
            slots += places % cache.block_size
            assert values[slots].tolist() == places.tolist(), "a position is not its own"
            history = keys[slots].tolist()
            first = part.context_length - part.query_length
            for offset in range(part.query_length):
                if (place := wanted.get(part.query_start + offset)) is not None:
                    logits[place] = logits_after(tuple(history[: first + offset + 1]))
        assert row == len(batch.token_ids)
        return logits


@functools.lru_cache(maxsize=100_000)
def logits_after(history: tuple[int, ...]) -> torch.Tensor:
    """The hash model's logits after these tokens."""
    digest = int.from_bytes(hashlib.blake2b(bytes(history), digest_size=4).digest(), "little")
    scrambled = (digest * (torch.arange(VOCAB) * 2_654_435_761 + 40_503)) % 1_000_003
    return scrambled.float() / 1_000_003 * 8


class LetterDetokenizer:
    is_settled = True

    def seed(self, pieces: list[str]) -> None:
        pass

    def push(self, piece: str) -> str:
        return piece

    def finish(self) -> str:
        return ""


class LetterTokenizer:
    def detokenizer(self) -> LetterDetokenizer:
        return LetterDetokenizer()

    def piece(self, token_id: int, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return letter(token_id)

    def settled_texts(self, skip_special_tokens: bool) -> dict[int, str]:  # noqa: ARG002
        return {}

    def pieces(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> list[str]:  # noqa: ARG002
        return [letter(token_id) for token_id in token_ids]


def letter(token_id: int) -> str:
    return chr(ord("A") + token_id)


def letters(token_ids: list[int]) -> str:
    return "".join(map(letter, token_ids))


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    """Everything that was said about one completion."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str = ""


def make_engine(
    blocks: int = 64, block_size: int = 4, model: object = None, clock: Clock | None = None, **config: object
) -> Engine:
    options = {
        "context_length": 256,
        "vocab_size": VOCAB,
        "eos_token_ids": frozenset({EOS}),
        "max_sequences": 8,
        "max_batch_tokens": 16,
    }
    adapters = {"a": "content-1", "b": "content-2"}
    cache = PagedKVCache(
        torch.full((1, blocks, block_size, 1, 1), -1, dtype=torch.int64),
        torch.full((1, blocks, block_size, 1, 1), -1, dtype=torch.int64),
    )
    return Engine(
        model or HashModel(),
        cache,
        LetterTokenizer(),
        EngineConfig(**{**options, **config}),
        adapter_identity=adapters.__getitem__,
        clock=clock or Clock(),
    )


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    arrived_at: float = 100.0,
    deadline: float | None = None,
    priority: int = 0,
    lora_name: str = "",
    **params: object,
) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})
    return EngineRequest(name, tuple(prompt), sampling, arrived_at, deadline, priority, lora_name)


def expected_greedy(prompt: list[int], count: int) -> list[int]:
    """What the hash model answers to a prompt, computed without an engine."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(logits_after(tuple(history)).argmax()))
    return history[len(prompt) :]


class Collector:
    """Runs an engine and joins what it says, by request and completion; checks the pool after each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[tuple[str, int], Answer] = {}
        self.last: dict[str, RequestOutput] = {}
        self.finished: list[str] = []

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.engine.scheduler.check()
        for output in outputs:
            assert output.request_id not in self.last, "an output after the last one"
            answer = self.answers.setdefault((output.request_id, output.index), Answer())
            assert answer.finish_reason is None, "an output after the completion's end"
            answer.text += output.text
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
            if output.request_finished:
                self.last[output.request_id] = output
                self.finished.append(output.request_id)
        return outputs

    def run(self, most_steps: int = 20_000) -> Collector:
        for _ in range(most_steps):
            if not self.engine.has_work:
                assert self.engine.pool.free_count == self.engine.pool.num_blocks
                return self
            self.step()
        raise AssertionError(f"not done after {most_steps} steps")


def run_alone(request: EngineRequest, **options: object) -> list[list[int]]:
    """The tokens of each completion when the engine, with room to spare, runs nothing else."""
    collector = Collector(make_engine(blocks=256, **options))
    collector.engine.add(request)
    collector.run()
    return [collector.answers[request.request_id, index].token_ids for index in range(request.params.n)]
