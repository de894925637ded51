"""The main job: a real server, a real model, a real client."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import torch
import transformers
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from served import Server

import numaserve
from numaserve.v1 import inference_pb2, inference_pb2_grpc

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    flags = ("--workers-per-node=2", "--kv-cache-memory=16MiB", "--dtype=float32")
    with Server(tiny_model, tmp_path_factory.mktemp("run") / "r", *flags) as running:
        yield running


@pytest.fixture
def client(server: Server):
    with server.client() as connected:
        yield connected


def reference_tokens(model_dir: Path, token_ids: list[int], count: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    output = model.generate(torch.tensor([token_ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return output[0, len(token_ids) :].tolist()


def test_greedy_answers_are_those_of_transformers_from_every_worker(server: Server, tiny_model: Path) -> None:
    with server.client(0) as first, server.client(1) as second:
        token_ids = list(first.tokenize(PROMPT).token_ids)
        expected = reference_tokens(tiny_model, token_ids, 24)
        for worker, client in enumerate((first, second)):
            answer = client.infer(prompt=PROMPT, max_tokens=24, temperature=0)
            assert list(answer.token_ids) == expected
            assert answer.served_by.worker == worker
            assert answer.served_by.pid == server.status().workers[worker].pid
            assert (answer.served_by.unit, list(answer.served_by.nodes)) == ("node0", [0])


def test_a_stream_joined_is_the_unary_answer(client: numaserve.Client) -> None:
    whole = client.infer(prompt=PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
    parts = list(client.stream(prompt=PROMPT, max_tokens=40, temperature=0, ignore_eos=True))
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == list(whole.token_ids)
    assert len(whole.token_ids) == 40
    assert parts[-1].finish_reason == whole.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    counts = {(answer.usage.prompt_tokens, answer.usage.completion_tokens) for answer in (whole, parts[-1])}
    assert counts == {(len(client.tokenize(PROMPT).token_ids), 40)}
    assert not any(part.HasField("usage") for part in parts[:-1])


def test_every_answer_carries_usage_and_timings(client: numaserve.Client) -> None:
    answer = client.infer(prompt=PROMPT, max_tokens=5, temperature=0, ignore_eos=True)
    assert answer.usage.prompt_tokens == len(client.tokenize(PROMPT).token_ids)
    assert answer.usage.completion_tokens == 5
    timings = answer.timings
    assert 0 <= timings.queued_ms <= timings.first_token_ms <= timings.total_ms
    assert timings.total_ms > 0


def test_a_prompt_may_be_token_ids_or_messages(client: numaserve.Client) -> None:
    token_ids = list(client.tokenize(PROMPT).token_ids)
    by_text = client.infer(prompt=PROMPT, max_tokens=8, temperature=0)
    by_ids = client.infer(prompt_token_ids=token_ids, max_tokens=8, temperature=0)
    assert by_ids.token_ids == by_text.token_ids
    messages = [{"role": "user", "content": "Hello"}]
    rendered = client.tokenize(messages=messages)
    assert "<|im_start|>user\nHello<|im_end|>" in rendered.text
    by_messages = client.infer(messages=messages, max_tokens=8, temperature=0)
    by_rendered = client.infer(prompt_token_ids=list(rendered.token_ids), max_tokens=8, temperature=0)
    assert by_messages.token_ids == by_rendered.token_ids


def test_a_seed_gives_the_same_answer_on_every_worker(server: Server) -> None:
    answers = []
    for worker in (0, 1):
        with server.client(worker) as client:
            answers.append(client.infer(prompt=PROMPT, max_tokens=16, temperature=1.0, seed=7).token_ids)
    assert answers[0] == answers[1]


def test_model_info_and_status_tell_the_same_story(
    server: Server, client: numaserve.Client, tiny_model: Path
) -> None:
    info, status = client.model_info(), server.status()
    assert info.model == status.model == tiny_model.name
    assert info.model_type == "llama"
    assert info.dtype == status.segments[0].dtype == "float32"
    assert info.weights_digest == status.segments[0].digest
    assert info.weights_bytes == status.segments[0].bytes
    assert info.placement == status.segments[0].verdict == "bound"
    assert info.has_chat_template
    assert info.max_context_length == 512
    assert [worker.state for worker in status.workers] == ["serving", "serving"]


def test_the_smallest_request_through_plain_stubs(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        request = inference_pb2.InferRequest(prompt=PROMPT, max_tokens=4)
        assert inference_pb2_grpc.InferenceStub(channel).Infer(request).usage.completion_tokens >= 1


@pytest.mark.parametrize(
    ("field", "request_fields"),
    [
        ("prompt", {"prompt": "", "max_tokens": 4}),
        ("max_tokens", {"prompt": PROMPT, "max_tokens": -1}),
        ("temperature", {"prompt": PROMPT, "temperature": float("nan")}),
        ("prompt_token_ids[1]", {"prompt_token_ids": [1, 10**6]}),
        ("prompt", {"prompt": PROMPT * 400}),
        ("model", {"prompt": PROMPT, "model": "another"}),
    ],
)
@pytest.mark.parametrize("method", ["Infer", "InferStream"])
def test_bad_requests_name_the_field(server: Server, method: str, field: str, request_fields: dict) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = getattr(inference_pb2_grpc.InferenceStub(channel), method)
        consume = list if method == "InferStream" else bool
        with pytest.raises(grpc.RpcError) as caught:
            consume(call(inference_pb2.InferRequest(**request_fields)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    details = error_details_pb2.BadRequest()
    assert rpc_status.from_call(caught.value).details[0].Unpack(details)
    assert field in [violation.field for violation in details.field_violations]
