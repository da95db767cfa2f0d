"""Chat templates: where they are found, what a bad one does, and where a conversation becomes a prompt."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from outfeed.gateway.chat import ChatTemplate, NoTemplate
from outfeed.ingress.request import Model
from outfeed.ingress.tokenize import Tokenize

from .conftest import Serve
from .fake import TEMPLATE, VOCABULARY, Played, WordTokenizer


def one(played: Played) -> None:
    played.end("one")


def test_a_model_without_a_template_says_so(serve: Serve) -> None:
    answer = serve().ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert answer.status == 400
    assert "chat template" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ 1 / messages[0].content|length - 1 + 'x' }}", "template"),
        ("{{ 1 / (messages[0].content|length - 1) }}", "division by zero"),
        ("{{ '{}'.format() }}", "out of range"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_a_400(serve: Serve, template: str, what: str) -> None:
    running = serve(template=template)
    answer = running.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert answer.status == 400
    assert what in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ tools|tojson(ensure_ascii=False) }}", '[{"b": "ü", "a": 1}]'),
        ("{{ tools|tojson(True) }}", '[{"b": "\\u00fc", "a": 1}]'),
        ("{{ tools|tojson(separators=(',', ':'), sort_keys=true) }}", '[{"a":1,"b":"ü"}]'),
        ("a\n  {% if tools %}\nb\n  {% endif %}\n", "a\nb\n"),
        ("{% for m in [1, 2] %}{% break %}{% endfor %}{{ strftime_now('%Y')|length }}", "4"),
        ("{{ tools|tojson(indent=1) }}", '[\n {\n  "b": "ü",\n  "a": 1\n }\n]'),
        ("{% generation %}\n{% set x = 1 %}{{ messages[0].content }}\n{% endgeneration %}|{{ x }}", "hi\n|"),
    ],
)
def test_what_models_templates_use_of_transformers_is_there(template: str, prompt: str) -> None:
    """GLM writes its tools with `ensure_ascii=False`; SmolLM marks what the assistant says."""
    messages = [{"role": "assistant", "content": "hi"}]
    assert ChatTemplate(template).render(messages, [{"b": "ü", "a": 1}]) == prompt


def test_templates_are_found_beside_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    config = tmp_path / "tokenizer_config.json"
    messages = [{"role": "user", "content": "ü"}]
    assert ChatTemplate.find(tokenizer) is None
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE}))
    found = ChatTemplate.find(tokenizer)
    assert found is not None
    assert found.render(messages) == "<s><user>ü\n<assistant>"
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "{{ messages|tojson }}"}]})
    )
    found = ChatTemplate.find(tokenizer)
    assert found is not None
    assert json.loads(found.render(messages)) == messages
    (tmp_path / "chat_template.jinja").write_text("file")
    found = ChatTemplate.find(tokenizer)
    assert found is not None
    assert found.render(messages) == "file"
    with pytest.raises(NoTemplate, match="no template"):
        ChatTemplate("{% if %}")
    with pytest.raises(NoTemplate, match="cannot read"):
        ChatTemplate.find(tokenizer, tmp_path / "missing")


@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', {"city": "Köln"}, "", None])
def test_a_calls_arguments_reach_a_template_as_an_object(serve: Serve, arguments: object) -> None:
    """Clients send JSON, and templates write JSON: as they come they would be quoted twice."""
    last = "(messages|last)"  # whose content is null: no text, and not the word for it
    running = serve(
        one, template=f"{{{{ {last}.content }}}}{{{{ {last}.tool_calls[0].function.arguments|tojson }}}}"
    )
    answer = running.ask("POST", "/v1/chat/completions", {"messages": called(arguments)})
    assert answer.status == 200
    told = "".join(map(chr, running.stream().prompt.ids))
    assert json.loads(told) == ({"city": "Köln"} if arguments else {})


@pytest.mark.parametrize(
    ("calls", "where"),
    [
        ({}, None),
        ([], None),
        ("f", "tool_calls"),
        (["f"], "tool_calls[0]"),
        ([{"function": "f"}], "tool_calls[0]"),
        *(
            ([{"function": {"name": "f", "arguments": arguments}}], "tool_calls[0].function.arguments")
            for arguments in ("{", "[1]", "5", 5, '{"x": "\\ud800"}')
        ),
    ],
)
def test_calls_that_are_none_are_a_400(serve: Serve, calls: object, where: str | None) -> None:
    messages = [{"role": "assistant", "content": "x", "tool_calls": calls}]
    answer = serve(one, template=TEMPLATE).ask("POST", "/v1/chat/completions", {"messages": messages})
    assert answer.status == (200 if where is None else 400)
    assert where is None or answer.json["error"]["param"] == f"messages[0].{where}"


def called(arguments: object) -> list[dict[str, object]]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def test_a_long_conversation_is_made_a_prompt_on_a_thread(serve: Serve) -> None:
    threads = []

    class Watched(ChatTemplate):
        def render(self, *conversation: Any) -> str:
            threads.append(threading.current_thread().name)
            return super().render(*conversation)

    running = serve(one)
    running.app.template = Watched(TEMPLATE)
    for parts, here in ((1, True), (20_000, False)):
        messages = [{"role": "user", "content": [{"type": "text", "text": ""}] * parts}]
        assert running.ask("POST", "/v1/chat/completions", {"messages": messages}).status in (200, 400)
        assert [not name.startswith("outfeed-body") for name in threads] == [here]
        threads.clear()


def test_a_chat_and_an_echo_wait_among_the_texts_that_are_tokenized(serve: Serve) -> None:
    running = serve(one, template=TEMPLATE)
    running.backend.tokenize = Tokenize(running.backend.model, waiting=0)
    long = "word " * 100
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": [5, 6, 7], "echo": True}),
    ):
        answer = running.ask("POST", path, body)
        assert answer.status == 503
        assert "wait to be tokenized" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"tools": [{"type": "function"}]}, "1"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "1"),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "none"),
        ({"tools": []}, "none"),
        ({}, "none"),
    ],
)
def test_tools_that_may_not_be_called_are_not_shown(serve: Serve, asked: dict[str, Any], shown: str) -> None:
    """A template asks `tools is not none` and tells the model to call one, if only of an empty list."""
    running = serve(one, template="{{ 'none' if tools is none else tools|length }}")
    asked = {"messages": [{"role": "user", "content": "x"}], **asked}
    assert running.ask("POST", "/v1/chat/completions", asked).status == 200
    assert "".join(map(chr, running.stream().prompt.ids)) == shown


@pytest.mark.parametrize(
    ("asked", "default", "skipped"),
    [
        ({"tools": [{"type": "function"}]}, None, False),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, None, False),
        ({"tools": [{"type": "function"}], "skip_special_tokens": True}, None, True),
        ({"tools": [{"type": "function"}], "skip_special_tokens": None}, True, True),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, None, True),
        ({"tools": []}, None, True),
        ({}, None, True),
    ],
)
def test_where_a_model_calls_a_tool_can_be_read_from_its_text(
    serve: Serve, asked: dict[str, Any], default: bool | None, skipped: bool
) -> None:
    """Many mark it with special tokens."""
    defaults = {} if default is None else {"skip_special_tokens": default}
    model = Model(VOCABULARY, 4096, WordTokenizer(), defaults=defaults)
    running = serve(one, template=TEMPLATE, model=model)
    asked = {"messages": [{"role": "user", "content": "x"}], **asked}
    assert running.ask("POST", "/v1/chat/completions", asked).status == 200
    assert running.stream().prompt.params.skip_special_tokens is skipped
