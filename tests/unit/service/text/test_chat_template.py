from __future__ import annotations

import re
from datetime import datetime

import pytest
import tiny_tokenizers
import transformers

from service.text.chat_template import ChatTemplate, ChatTurn, TemplateError

# The shapes of templates that public checkpoints have.
CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3 = """{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'\
+ message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if tools is not none %}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""
NAMESPACE = """{% set ns = namespace(count=0, last='') %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if message.role == 'halt' %}{% break %}{% endif %}
    {% set ns.count = ns.count + 1 %}{% set ns.last = message.content %}
    {# a comment #}
    {{ message | tojson }} {{ dict(a=1) }} {{ message.content | tojson(indent=2) }}
{% endfor %}
{{ ns.count }}{{ ns.last }}{{ undefined_name }}{{ undefined_name is defined }}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "namespace": NAMESPACE}
CONVERSATIONS = {
    "one": [("user", "Hi")],
    "system": [("system", "Be brief."), ("user", ' Hi <b>&"\'there" \n')],
    "long": [("user", "你好 😀"), ("assistant", "Yes."), ("user", "{{ 7 * 7 }} {% endfor %}")],
    "two_users": [("user", "a"), ("user", "b")],
    "controls": [("user", "a"), ("skip", "b"), ("user", "c"), ("halt", "d"), ("user", "e")],
    "empty": [("user", "")],
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_text_is_that_of_transformers(
    source: str, turns: list[tuple[str, str]], add_generation_prompt: bool
) -> None:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizers.byte_level_bpe(), chat_template=source, **SPECIAL_TOKENS
    )
    ours = ChatTemplate(source, SPECIAL_TOKENS)
    messages = [ChatTurn(role, content) for role, content in turns]
    try:
        expected = theirs.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:
        with pytest.raises(TemplateError, match=re.escape(str(error))):
            ours.render(messages, add_generation_prompt)
    else:
        assert ours.render(messages, add_generation_prompt) == expected


def test_a_template_refuses_in_its_own_words() -> None:
    template = ChatTemplate(MISTRAL, SPECIAL_TOKENS)
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.render([ChatTurn("assistant", "a")])
    with pytest.raises(TemplateError, match="System role not supported"):
        ChatTemplate(GEMMA, SPECIAL_TOKENS).render([ChatTurn("system", "a")])


def test_the_date_is_at_hand() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}")
    assert template.render([]) in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize("source", [None, ""])
def test_no_template(source: str | None) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate(source)


def test_a_syntax_error_names_the_line() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("a\n{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) | length + '' }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__dict__ = 1 %}",
        "{{ dict.__class__.mro() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include 'other' %}",
        "{{ lipsum.__globals__['os'] }}",
    ],
)
def test_escapes_from_the_sandbox_are_refused(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([ChatTurn("user", "a")])


@pytest.mark.parametrize(
    "source",
    ["{{ 1 // 0 }}", "{{ messages[0].content + 1 }}", "{{ missing.name }}", "{{ 'x' | nosuchfilter }}"],
)
def test_faults_of_a_template_are_template_errors(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(source).render([ChatTurn("user", "a")])
