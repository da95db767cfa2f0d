"""What OpenAI's endpoints take from a body, and what they refuse because the answer would be another one."""

import json
from typing import Any

import pytest
from outfeed.gateway.naming import SAMPLING
from outfeed.gateway.openai import NOT_TAKEN

from .conftest import Running, Serve
from .fake import TEMPLATE, Played

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x"},
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
BOTH = pytest.mark.parametrize("path", BODIES)


def one(played: Played) -> None:
    played.end("one")


@pytest.fixture
def running(serve: Serve) -> Running:
    return serve(one, template=TEMPLATE)


def params(running: Running, path: str, **more: Any) -> Any:
    """Return the sampling parameters that a request with these fields has."""
    assert running.ask("POST", f"/v1/{path}", {**BODIES[path], **more}).status == 200
    return running.stream().prompt.params


def refusal(running: Running, path: str, **more: Any) -> tuple[str, str]:
    """Return the field that a request is refused for, and what its client reads."""
    answer = running.ask("POST", f"/v1/{path}", {**BODIES[path], **more})
    assert answer.status == 400
    assert running.backend.streams == []
    return answer.json["error"]["param"], answer.json["error"]["message"]


@BOTH
@pytest.mark.parametrize(("more", "length"), [({}, 5), ({"max_tokens": 9}, 5), ({"max_tokens": None}, 5)])
def test_the_newer_name_of_an_answers_length_counts(
    running: Running, path: str, more: dict[str, Any], length: int
) -> None:
    assert params(running, path, max_completion_tokens=5, **more).max_new_tokens == length


@BOTH
def test_a_length_that_is_none_is_told_by_the_name_it_was_sent_with(running: Running, path: str) -> None:
    field, message = refusal(running, path, max_completion_tokens=-3)
    assert field == "max_completion_tokens"
    assert "max_new_tokens" not in message


@BOTH
def test_special_tokens_stand_without_spaces_between_them_for_who_asks(running: Running, path: str) -> None:
    assert not params(running, path, spaces_between_special_tokens=False).spaces_between_special_tokens


@BOTH
@pytest.mark.parametrize("field", NOT_TAKEN)
def test_a_field_that_would_change_the_answer_is_refused_with_what_to_use(
    running: Running, path: str, field: str
) -> None:
    assert refusal(running, path, **{field: 7}) == (
        field,
        f"{field}: is not supported, got 7; {NOT_TAKEN[field]}",
    )


def test_generates_names_for_what_openai_calls_otherwise_are_not_passed_over() -> None:
    assert {ours for theirs, ours in SAMPLING.items() if theirs != ours} <= {*NOT_TAKEN}
    assert not {*SAMPLING} & {*NOT_TAKEN}


@BOTH
@pytest.mark.parametrize("wanted", [0, 2, True, "1"])
def test_there_is_one_answer_and_no_best_of_several(running: Running, path: str, wanted: Any) -> None:
    assert refusal(running, path, best_of=wanted)[0] == "best_of"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("completions", {"add_special_tokens": False}),
        ("completions", {"add_special_tokens": "yes"}),
        ("chat/completions", {"add_special_tokens": True}),
        ("chat/completions", {"echo": True}),
        ("chat/completions", {"reasoning_effort": 3}),
        ("chat/completions", {"chat_template_kwargs": ["reasoning_effort"]}),
    ],
)
def test_a_prompt_is_made_as_it_always_is_or_not_at_all(
    running: Running, path: str, more: dict[str, Any]
) -> None:
    (field,) = more
    assert refusal(running, path, **more)[0] == field


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("completions", {"add_special_tokens": True}),
        ("completions", {"add_special_tokens": None, "best_of": 1}),
        ("chat/completions", {"add_special_tokens": False, "echo": False, "best_of": None}),
        ("chat/completions", {"add_special_tokens": None, "echo": None, "reasoning_effort": None}),
    ],
)
def test_who_says_what_is_done_anyway_is_served(running: Running, path: str, more: dict[str, Any]) -> None:
    params(running, path, **more)


@pytest.mark.parametrize(
    ("asked", "effort"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": True}}, "low thinking"),
        ({"reasoning_effort": None, "chat_template_kwargs": None}, ""),
    ],
)
def test_a_template_hears_how_much_the_model_is_to_think(
    serve: Serve, asked: dict[str, Any], effort: str
) -> None:
    running = serve(one, template="{{ reasoning_effort }}{{ ' thinking' if thinking }}:")
    params(running, "chat/completions", **asked)
    assert "".join(map(chr, running.stream().prompt.ids)) == f"{effort}:"


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
    "triggers": ["<f"],
}


@BOTH
def test_an_answer_may_have_tags_with_a_structure(running: Running, path: str) -> None:
    assert json.loads(params(running, path, response_format=TAG).structural_tag) == TAG


@BOTH
@pytest.mark.parametrize(
    ("schema", "sent"),
    [({}, {}), ({"schema": None}, {}), ({"schema": True}, True), ({"schema": {"a": 1}}, {"a": 1})],
)
def test_an_answer_may_be_any_json_or_that_of_a_schema(
    running: Running, path: str, schema: dict[str, Any], sent: Any
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", **schema}}
    assert json.loads(params(running, path, response_format=wanted).json_schema) == sent


@BOTH
@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"json_schema": "{}", "response_format": {"type": "json_object"}}, "response_format"),
        ({"structural_tag": "{}", "response_format": TAG}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"regex": "a", "response_format": TAG}, "response_format"),
    ],
)
def test_an_answer_has_one_form(running: Running, path: str, more: dict[str, Any], named: str) -> None:
    field, message = refusal(running, path, **more)
    assert field == named
    if "at most one of" in message:
        rules = message.split("at most one of ")[1].split("; ")[0].split(", ")
        assert sorted({*rules}) == sorted(rules), "each rule is named once"


@BOTH
def test_an_answer_that_may_be_any_text_may_have_another_rule(running: Running, path: str) -> None:
    found = params(running, path, response_format={"type": "text"}, json_schema='{"type": "array"}')
    assert found.json_schema == '{"type": "array"}'
