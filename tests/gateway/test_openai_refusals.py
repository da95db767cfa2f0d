"""What OpenAI's endpoints refuse, and that it is said of the field that the client sent."""

import pytest
from outfeed.ingress.request import Model

from .conftest import Running, Serve
from .fake import HI, VOCABULARY, WordTokenizer


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"model": "m"}, "prompt"),
        ("completions", {"prompt": 5}, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": -2}, "max_tokens"),
        ("completions", {"prompt": "x", "n": 2}, "n"),
        ("completions", {"prompt": "x", "logprobs": 1000}, "logprobs"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": "x", "stream": "yes"}, "stream"),
        ("completions", {"prompt": [["x"]], "echo": True}, "echo"),
        ("completions", {"prompt": "x", "echo": "no"}, "echo"),
        ("completions", {"prompt": "x", "best_of": True}, "best_of"),
        ("completions", {"prompt": "x", "stream_options": []}, "stream_options"),
        ("completions", {"prompt": "x", "stream_options": {"include_usage": 1}}, "include_usage"),
        ("completions", {"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
        ("completions", [], "object"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": ["hi"]}, "messages[0]"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content[0]",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "u", "content": "x"}], "response_format": {}},
            "response_format",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "u", "content": "x"}], "chat_template_kwargs": {"messages": 1}},
            "chat_template_kwargs",
        ),
    ],
)
def test_what_is_wrong_is_a_400_in_openais_shape(
    running: Running, path: str, body: object, field: str
) -> None:
    answer = running.ask("POST", f"/v1/{path}", body)
    assert answer.status == 400
    error = answer.json["error"]
    assert set(error) == {"object", "message", "type", "param", "code"}
    assert field in error["message"]
    assert running.backend.streams == []


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": False}, "top_logprobs"),
        ({"tools": "f"}, "tools"),
        ({"tools": ["f"]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": TOOL}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_a_chat_that_asks_for_what_it_would_not_get_is_a_400(
    running: Running, more: dict[str, object], param: str
) -> None:
    answer = running.ask("POST", "/v1/chat/completions", {"messages": HI, **more})
    assert answer.status == 400
    assert answer.json["error"]["param"] == param
    assert running.backend.streams == []


def test_what_other_servers_take_may_be_declined(running: Running) -> None:
    declined: dict[str, object] = {
        "guided_json": None,
        "continue_final_message": False,
        "lora_path": "",
        "bad_words": [],
    }
    declined |= {"add_generation_prompt": True, "functions": None}
    assert running.ask("POST", "/v1/chat/completions", {"messages": HI, **declined}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("completions", {"prompt": "x", "max_tokens": -2}, "max_tokens", "at least 0"),
        ("completions", {"prompt": "x", "max_tokens": "many"}, "max_tokens", "integer"),
        ("completions", {"prompt": "x", "max_tokens": 9, "min_tokens": 10}, "min_tokens", "[0, max_tokens]"),
        ("completions", {"prompt": "x", "seed": 2**70}, "seed", "64-bit"),
        ("completions", {"prompt": "x", "stop_regex": ["ok", "("]}, "stop_regex[1]", "compile"),
        ("completions", {"prompt": "x", "logit_bias": {"5": "a"}}, "logit_bias[5]", "number"),
        ("completions", {"prompt": True}, "prompt", "a string"),
        ("completions", {"prompt": []}, "prompt", "token ids"),
        ("completions", {"prompt": ["a", 5]}, "prompt[1]", "string"),
        ("completions", {"prompt": [5, "a"]}, "prompt[1]", "token id"),
        ("completions", {"prompt": [[5], [99999]]}, "prompt[1][0]", "token id"),
        ("completions", {"prompt": "x", "regex": "a", "ebnf": "b"}, "ebnf", "at most one of"),
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs", "[0, 20]"),
        ("chat/completions", {"messages": HI, "max_tokens": -1}, "max_tokens", "at least 0"),
        ("chat/completions", {"messages": HI, "max_completion_tokens": -1}, "max_completion_tokens", "0"),
        (
            "chat/completions",
            {"messages": HI, "max_completion_tokens": 3, "max_tokens": 9, "min_tokens": 4},
            "min_tokens",
            "[0, max_completion_tokens]",
        ),
        ("chat/completions", {"messages": HI, "top_logprobs": 99, "logprobs": True}, "top_logprobs", "20"),
        (
            "chat/completions",
            {"messages": HI, "regex": "a", "response_format": {"type": "json_object"}},
            "regex",
            "response_format, regex",
        ),
    ],
)
def test_an_error_names_the_field_that_the_client_sent(
    running: Running, path: str, body: dict[str, object], param: str, words: str
) -> None:
    error = running.ask("POST", f"/v1/{path}", body).json["error"]
    assert error["code"] == 400
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert words in error["message"]
    unknown = (
        "sampling_params",
        "max_new_tokens",
        "min_new_tokens",
        "sampling_seed",
        "input_ids",
        "top_logprobs_num",
    )
    assert not [name for name in unknown if name in error["message"]]


def test_what_the_client_wrote_is_shown_as_it_wrote_it(running: Running) -> None:
    for wrote in ("max_new_tokens", "it's input_ids (", 'a "sampling_seed" ('):
        answer = running.ask("POST", "/v1/completions", {"prompt": "x", "stop_regex": wrote + "("})
        assert repr(wrote + "(") in answer.json["error"]["message"]


def test_a_limit_below_openais_own_is_told_of_the_clients_field(serve: Serve) -> None:
    running = serve(model=Model(VOCABULARY, 4096, WordTokenizer(), max_top_logprobs=5))
    error = running.ask("POST", "/v1/completions", {"prompt": "x", "logprobs": 6}).json["error"]
    assert error["param"] == "logprobs"
