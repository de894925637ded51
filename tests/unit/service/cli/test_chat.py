"""`numaserve chat` against a server over a fake engine, with piped input and with Ctrl-C."""

import argparse
import asyncio
import io
import itertools

import pytest
from serving_fixtures import client, engine, options, server

from numaserve import Client
from service.cli import chat

__all__ = ["client", "engine", "options", "server"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return parser.parse_args(arguments)


def prompts(engine) -> list[str]:
    return ["".join(map(chr, request.prompt_token_ids)) for request in engine.requests]


@pytest.fixture
def converse(server, monkeypatch):
    async def converse(text: str, *arguments: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return await asyncio.to_thread(chat.run, parse("--address", server.addresses[0], *arguments))

    return converse


async def test_a_piped_conversation_keeps_its_history(converse, engine, capsys):
    assert await converse("a\n\nb\n", "--system", "S", "--max-tokens", "2", "--temperature", "0") == 0
    assert prompts(engine) == [
        "<system>S<user>a<assistant>",
        "<system>S<user>a<assistant>he<user>b<assistant>",
    ]
    assert engine.requests[0].params.temperature == 0
    assert capsys.readouterr().out == "he\nhe\n"


async def test_commands(converse, engine, capsys):
    assert await converse("a\n/reset\nb\n/system T\nc\n/help\n/quit\nd\n", "--system", "S") == 0
    assert prompts(engine) == [
        "<system>S<user>a<assistant>",
        "<system>S<user>b<assistant>",
        "<system>T<user>c<assistant>",
    ]
    assert chat.HELP in capsys.readouterr().out


async def test_a_failed_call_ends_a_piped_conversation(converse, engine, capsys):
    engine.error = ZeroDivisionError("boom")
    assert await converse("a\nb\n") == 1
    assert "INTERNAL" in capsys.readouterr().err
    assert len(engine.requests) == 1


async def test_no_server_is_an_error(tmp_path, capsys):
    arguments = parse("--address", f"unix:{tmp_path}/nobody.sock", "--connect-timeout", "0.1")
    assert await asyncio.to_thread(chat.run, arguments) == 1
    assert f"no server answers at unix:{tmp_path}/nobody.sock" in capsys.readouterr().err


async def test_an_interactive_conversation_survives_a_failed_call(server, engine, capsys):
    def talk() -> int:
        with Client(server.addresses[0]) as client:
            conversation = chat.Chat(client, True, parse("--max-tokens", "2"))
            return conversation.talk(iter(["x" * 100, "b"]), True)

    assert await asyncio.to_thread(talk) == 0
    assert prompts(engine) == ["<user>b<assistant>"]
    assert "INVALID_ARGUMENT" in capsys.readouterr().err


class InterruptedClient:
    """Streams one part, then behaves as Ctrl-C does."""

    def __init__(self):
        self.closed = False
        self.asked = []

    def stream(self, **fields):
        self.asked.append(fields)
        try:
            yield argparse.Namespace(text="half")
            raise KeyboardInterrupt
        finally:
            self.closed = True


def test_ctrl_c_stops_the_answer_and_not_the_program(capsys):
    client = InterruptedClient()
    conversation = chat.Chat(client, True, parse())
    assert conversation.talk(iter(["a", "/quit"]), True) == 0
    assert client.closed
    assert conversation.history == [("user", "a"), ("assistant", "half")]
    assert capsys.readouterr().out == "half [stopped]\n"


def test_a_model_without_a_template_gets_plain_prompts():
    client = InterruptedClient()
    chat.Chat(client, False, parse()).answer("once")
    assert (client.asked[0]["prompt"], client.asked[0]["messages"]) == ("once", None)


def test_ctrl_c_at_the_prompt_clears_the_line(monkeypatch, capsys):
    typed = iter([KeyboardInterrupt(), "hi", EOFError()])

    def type_next(_prompt: str) -> str:
        value = next(typed)
        if isinstance(value, BaseException):
            raise value
        return value

    monkeypatch.setattr("builtins.input", type_next)
    assert list(itertools.islice(chat._lines(io.StringIO(), True), 5)) == ["hi"]
    assert capsys.readouterr().out == "\n\n"
