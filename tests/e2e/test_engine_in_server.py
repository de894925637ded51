"""A real server's engine: prefix hits in usage and status, embeddings, and what 1,000 dropped streams leave behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
import transformers
from served import Server
from tiny_models import make_tiny_model

import numaserve

CANCELS = 1000
WARM_UP = 300
ALLOWED_GROWTH = 8 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory):
    flags = ("--workers-per-node=1", "--kv-cache-memory=4MiB", "--dtype=float32", "--max-num-seqs=16")
    with Server(model, tmp_path_factory.mktemp("run") / "r", *flags) as running:
        yield running


@pytest.fixture
def client(server: Server):
    with server.client(0) as connected:
        yield connected


def resident_bytes(pid: int) -> int:
    line = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")
    )
    return int(line.split()[1]) << 10


def test_cached_tokens_are_counted_in_usage_and_status(server: Server, client: numaserve.Client) -> None:
    prompt = [7 + place % 300 for place in range(100)]
    before = server.status().workers[0].cached_tokens
    answers = [client.infer(prompt_token_ids=prompt, max_tokens=5, temperature=0) for _ in range(2)]
    # Six whole blocks of 16 tokens are found again; the seventh is not full.
    assert [answer.usage.cached_tokens for answer in answers] == [0, 96]
    assert list(answers[0].token_ids) == list(answers[1].token_ids)
    parts = list(client.stream(prompt_token_ids=[*prompt, 9], max_tokens=5, temperature=0))
    assert parts[-1].usage.cached_tokens == 96
    # The row is written after the step whose output the client has; a later answer says that it is there.
    client.infer(prompt_token_ids=[5], max_tokens=1)
    assert server.status().workers[0].cached_tokens - before == 192


def test_embeddings_are_those_of_transformers(client: numaserve.Client, model: Path) -> None:
    texts = ["The quick brown fox", "one", "naïve café, 東京 " * 20]
    reference = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    for pooling in ("mean", "last"):
        answer = client.embed(texts, pooling=pooling)
        for text, vector in zip(texts, answer.embeddings, strict=True):
            token_ids = list(client.tokenize(text).token_ids)
            with torch.no_grad():
                hidden = reference(torch.tensor([token_ids])).last_hidden_state[0]
            pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
            expected = (pooled / pooled.norm()).tolist()
            assert list(vector.values) == pytest.approx(expected, abs=1e-4)
            assert vector.prompt_tokens == len(token_ids)
        assert answer.dimension == reference.config.hidden_size


def test_embedding_with_a_passed_deadline_and_bad_inputs(client: numaserve.Client) -> None:
    with pytest.raises(numaserve.InferenceError) as caught:
        client.embed([[5] * 400] * 64, timeout=0.01)
    assert caught.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
    with pytest.raises(numaserve.InferenceError) as caught:
        client.embed(["fine", [5] * 5000])
    assert [violation.field for violation in caught.value.field_violations] == ["inputs[1].token_ids"]


def drop_streams(client: numaserve.Client, count: int) -> None:
    """Opens streams, eight at a time, and drops each after its first part."""

    def drop(number: int) -> None:
        parts = client.stream(
            prompt_token_ids=[3 + (number * 7 + place) % 380 for place in range(17)],
            max_tokens=400,
            temperature=0.8,
            ignore_eos=True,
        )
        next(parts)
        parts.close()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(drop, range(count)))


def test_thousand_dropped_streams_leave_the_pool_whole_and_memory_flat(
    server: Server, client: numaserve.Client
) -> None:
    drop_streams(client, WARM_UP)
    pid = server.status().workers[0].pid
    before = resident_bytes(pid)
    drop_streams(client, CANCELS - WARM_UP)
    # Two whole requests later every cancel has been acted on, as they are in order with them.
    for _ in range(2):
        client.infer(prompt_token_ids=[5], max_tokens=2)
    after = resident_bytes(pid)
    worker = server.status().workers[0]
    assert (worker.running, worker.waiting) == (0, 0)
    assert worker.kv_blocks_free == worker.kv_blocks_total > 0
    assert worker.pid == pid
    assert worker.restarts == 0
    assert after - before < ALLOWED_GROWTH, (
        f"{(after - before) >> 10} KiB more after {CANCELS - WARM_UP} cancels"
    )
