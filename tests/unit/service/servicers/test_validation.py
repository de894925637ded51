"""Each fault of an InferRequest is refused with its field named."""

import math

import pytest
from serving_fakes import BOS, CONTEXT, VOCAB_SIZE, make_served_model

from numaserve.v1 import inference_pb2
from service.engine.request import StructuredKind, StructuredOutput
from service.served_model import SamplingDefaults
from service.servicers.errors import MAX_DETAIL_BYTES, FieldViolation, InvalidRequest, bad_request
from service.servicers.validation import CheckedRequest, check_infer_request


def check(served=None, /, **fields) -> CheckedRequest:
    request = inference_pb2.InferRequest(**fields)
    return check_infer_request(request, served or make_served_model(), request.request_id or "r1", None)


def faulty_fields(served=None, /, **fields) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        check(served, **fields)
    return [violation.field for violation in caught.value.violations]


def structured(**kind) -> inference_pb2.StructuredOutput:
    return inference_pb2.StructuredOutput(**kind)


def choices(*texts: str) -> inference_pb2.Choices:
    return inference_pb2.Choices(choices=texts)


def user(content: str = "hi", role: str = "user") -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(role=role, content=content)


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"model": "other"}, "model"),
        ({"request_id": "two words"}, "request_id"),
        ({"request_id": "line\nbreak"}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"prompt": "x" * (CONTEXT - 1)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": CONTEXT - 2}, "max_tokens"),
        ({"max_tokens": 2**31 - 1}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": CONTEXT}, "min_tokens"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"typical_p": 2}, "typical_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias[-1]"),
        ({"logit_bias": {VOCAB_SIZE: 0.0}}, f"logit_bias[{VOCAB_SIZE}]"),
        ({"logit_bias": {5: 101.0}}, "logit_bias[5]"),
        ({"logit_bias": {5: math.nan}}, "logit_bias[5]"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ["ok", ""]}, "stop[1]"),
        ({"stop": ["x" * 1025]}, "stop[0]"),
        ({"stop": [str(number) for number in range(65)]}, "stop"),
        ({"stop_token_ids": [4, VOCAB_SIZE]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"structured_output": structured()}, "structured_output"),
        ({"structured_output": structured(json_object=False)}, "structured_output.json_object"),
        ({"structured_output": structured(json_schema="{")}, "structured_output.json_schema"),
        ({"structured_output": structured(json_schema="[]")}, "structured_output.json_schema"),
        ({"structured_output": structured(json_schema="[" * 100_000)}, "structured_output.json_schema"),
        ({"structured_output": structured(json_schema="")}, "structured_output.json_schema"),
        ({"structured_output": structured(regex="")}, "structured_output.regex"),
        ({"structured_output": structured(grammar="")}, "structured_output.grammar"),
        ({"structured_output": structured(choice=choices())}, "structured_output.choice.choices"),
        ({"structured_output": structured(choice=choices("a", ""))}, "structured_output.choice.choices[1]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "", "prompt_token_ids": [VOCAB_SIZE]}, "prompt_token_ids[0]"),
        ({"prompt": "", "prompt_token_ids": [3, -1]}, "prompt_token_ids[1]"),
        ({"prompt": "", "prompt_token_ids": [3] * CONTEXT}, "prompt_token_ids"),
        ({"prompt": "", "messages": [user("x" * CONTEXT)]}, "messages"),
        ({"prompt": "", "messages": [user(), user(role="wizard")]}, "messages[1].role"),
        ({"prompt": "", "messages": [user(role="")]}, "messages[0].role"),
        ({"prompt": "", "messages": [user(role="tool")]}, "messages"),
    ],
)
def test_one_fault_is_the_one_violation(fields, at_fault):
    assert faulty_fields(**({"prompt": "hello"} | fields)) == [at_fault]


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"prompt": "a", "prompt_token_ids": [5]}, ["prompt", "prompt_token_ids"]),
        ({"prompt": "a", "messages": [user()]}, ["prompt", "messages"]),
        (
            {"prompt": "a", "prompt_token_ids": [5], "messages": [user()]},
            ["prompt", "prompt_token_ids", "messages"],
        ),
        (
            {"prompt": "a", "max_tokens": -3, "temperature": math.nan, "top_p": 7, "model": "x"},
            ["model", "max_tokens", "temperature", "top_p"],
        ),
        ({"max_tokens": 0, "stop": [""]}, ["prompt", "max_tokens", "stop[0]"]),
    ],
)
def test_every_fault_is_reported_at_once(fields, at_fault):
    assert faulty_fields(**fields) == at_fault


def test_messages_need_a_chat_template():
    model = make_served_model(chat_template=None)
    assert faulty_fields(model, messages=[user()]) == ["messages"]


def test_many_bad_ids_are_summed_up():
    fields = faulty_fields(prompt_token_ids=[VOCAB_SIZE] * 1000)
    assert fields == [*(f"prompt_token_ids[{place}]" for place in range(5)), "prompt_token_ids"]


def test_a_bad_request_fits_into_a_trailer():
    violations = [FieldViolation(f"stop[{place}]", "é" * 5000) for place in range(1000)]
    detail = bad_request(violations)
    assert 10 < len(detail.field_violations) < 1000
    assert detail.ByteSize() <= MAX_DETAIL_BYTES
    assert detail.field_violations[0].field == "stop[0]"


def test_what_is_left_out_takes_the_defaults():
    checked = check(prompt="hello")
    request = checked.engine_request
    assert request.prompt_token_ids == (BOS, *map(ord, "hello"))
    assert request.params.max_tokens == CONTEXT - 6
    assert request.params.temperature == 1.0
    assert request.params.skip_special_tokens
    assert request.params.logprobs is None
    assert request.params.n == 1
    assert checked.echo_text == ""


def test_model_defaults_stand_in_and_the_request_wins():
    model = make_served_model(sampling_defaults=SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20))
    params = (check(model, prompt="a", top_p=1.0)).engine_request.params
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 1.0, 20)


def test_every_field_reaches_the_engine():
    checked = check(
        prompt="hello",
        max_tokens=8,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={7: -100.0},
        seed=2**64 - 1,
        n=2,
        stop=["end", "end", "stop"],
        stop_token_ids=[9],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=0,
        prompt_logprobs=20,
        priority=-4,
        structured_output=structured(choice=choices("yes", "no")),
    )
    request = checked.engine_request
    params = request.params
    assert request.priority == -4
    assert (params.max_tokens, params.min_tokens) == (8, 2)
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 3)
    assert (params.min_p, params.typical_p, params.repetition_penalty) == (0.125, 0.75, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (-1, 2)
    assert params.logit_bias == {7: -100.0}
    assert (params.seed, params.n) == (2**64 - 1, 2)
    assert (params.stop, params.stop_token_ids) == (("end", "stop"), frozenset([9]))
    assert (params.include_stop_str_in_output, params.ignore_eos, params.skip_special_tokens) == (
        True,
        True,
        False,
    )
    assert (params.logprobs, params.prompt_logprobs) == (0, 20)
    assert params.structured_output == StructuredOutput(StructuredKind.CHOICE, choices=("yes", "no"))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"json_schema": '{"type": "object"}'}, (StructuredKind.JSON_SCHEMA, '{"type": "object"}')),
        ({"json_object": True}, (StructuredKind.JSON_OBJECT, "")),
        ({"regex": "[a-z]+"}, (StructuredKind.REGEX, "[a-z]+")),
        ({"grammar": 'start: "a"'}, (StructuredKind.GRAMMAR, 'start: "a"')),
    ],
)
def test_structured_output_reaches_the_engine(kind, expected):
    checked = check(prompt="a", structured_output=structured(**kind))
    assert checked.engine_request.params.structured_output == StructuredOutput(*expected)


@pytest.mark.parametrize(
    ("asked", "settled"),
    [(0.0, 0.0), (1e-38, 0.0), (0.01, pytest.approx(0.01))],
)
def test_a_temperature_too_small_to_divide_by_is_greedy(asked, settled):
    assert (check(prompt="a", temperature=asked, n=3)).engine_request.params.temperature == settled


@pytest.mark.parametrize(("asked", "settled"), [(-1, 0), (0, 0), (7, 7), (VOCAB_SIZE, 0), (2**31 - 1, 0)])
def test_top_k_that_keeps_all_is_zero(asked, settled):
    assert (check(prompt="a", top_k=asked)).engine_request.params.top_k == settled


def test_absent_seeds_differ():
    seeds = {(check(prompt="a")).engine_request.params.seed for _ in range(4)}
    assert len(seeds) == 4


def test_prompt_and_answer_may_fill_the_context_exactly():
    checked = check(prompt="x" * (CONTEXT - 2))
    assert checked.engine_request.params.max_tokens == 1
    checked = check(prompt_token_ids=[5] * 60, max_tokens=4, stop=["end"])
    assert checked.engine_request.prompt_token_ids == (5,) * 60
    assert checked.engine_request.params.stop == ("end",)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "hi"}, "hi"),
        ({"prompt_token_ids": [ord("h"), BOS, ord("i")]}, "h\x01i"),
        ({"messages": [user("hi")]}, "<user>hi<assistant>"),
    ],
)
def test_echo_holds_the_prompt_as_text(fields, text):
    assert (check(echo=True, **fields)).echo_text == text


def test_messages_are_rendered_without_further_special_tokens():
    checked = check(messages=[user("be brief", role="system"), user("hi")])
    text = "<system>be brief<user>hi<assistant>"
    assert checked.engine_request.prompt_token_ids == tuple(map(ord, text))


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({}, SamplingDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": None, "top_k": 20},
            {"temperature": 0.6, "top_k": 20},
        ),
        ({"repetition_penalty": 1.1, "min_p": 0, "typical_p": 1}, {"repetition_penalty": 1.1}),
    ],
)
def test_defaults_come_from_generation_config(config, defaults):
    expected = defaults if isinstance(defaults, SamplingDefaults) else SamplingDefaults(**defaults)
    assert SamplingDefaults.from_generation_config(config) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_k", 1.5), ("min_p", math.nan)],
)
def test_a_bad_generation_config_names_file_and_field(name, value):
    with pytest.raises(ValueError, match=f"generation_config.json: {name} "):
        SamplingDefaults.from_generation_config({name: value})
