"""A `/generate` body, from bytes to prompts that may be submitted."""

import json
import math
import os
from typing import Any, cast

import pytest
from outfeed.ingress.errors import BadRequest
from outfeed.ingress.request import (
    DRAWN_RIDS,
    Model,
    Ready,
    decode_body,
    make_rid,
    parse_generate,
    ready,
)

MODEL = Model(vocab_size=1000, context_length=200, tokenizer=cast(Any, object()))
BARE = Model(vocab_size=1000, context_length=200)


def refused(body: Any, model: Model = MODEL) -> BadRequest:
    def admit() -> None:
        for prompt in parse_generate(body, model).prompts:
            ready(prompt, [1, 2, 3] if prompt.ids is None else prompt.ids, False, model)

    with pytest.raises(BadRequest) as caught:
        admit()
    assert caught.value.status == 400
    return caught.value


def test_one_text() -> None:
    request = parse_generate({"text": "hello", "stream": True, "rid": "r1"}, MODEL)
    (prompt,) = request.prompts
    assert (prompt.text, prompt.rid, prompt.ids, request.batch, request.stream) == (
        "hello",
        "r1",
        None,
        False,
        True,
    )


def test_one_list_of_ids() -> None:
    request = parse_generate({"input_ids": [5, 0, 999]}, BARE)
    (prompt,) = request.prompts
    assert prompt.ids is not None
    assert prompt.ids.tolist() == [5, 0, 999]
    assert not request.stream
    assert len(prompt.rid) == 32


def test_a_batch_is_a_batch_whatever_its_length() -> None:
    assert parse_generate({"text": ["a"]}, MODEL).batch
    request = parse_generate({"input_ids": [[1], [2, 3]], "sampling_params": [{"top_p": 0.5}, {}]}, MODEL)
    assert request.batch
    assert [prompt.params.top_p for prompt in request.prompts] == [0.5, 1.0]
    assert len({prompt.rid for prompt in request.prompts}) == 2


@pytest.mark.parametrize(
    "body",
    [
        {}, {"text": None}, {"text": "a", "input_ids": [1]}, {"text": 5}, {"text": []}, {"text": [1]},
        {"text": ["a"] * 1025}, {"text": "\ud800"}, {"input_ids": []}, {"input_ids": [[]]},
        {"input_ids": [1, [2]]}, {"input_ids": [[1], 2]}, {"input_ids": [True]}, {"input_ids": [1.0]},
        {"input_ids": [-1]}, {"input_ids": [1000]}, {"input_ids": [2**70]}, {"input_ids": "12"},
        {"text": {"a": 1}}, [], None, 5, "text",
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(body: Any) -> None:
    refused(body)


def test_the_culprit_of_a_list_is_numbered() -> None:
    assert refused({"input_ids": [[1, 2], [3, 1000]]}).field == "input_ids[1][1]"
    assert refused({"text": ["a", 7]}).field == "text[1]"
    assert refused({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}).field == "sampling_params[1].n"


def test_an_unknown_field_is_named() -> None:
    assert "'temperature'" in refused({"text": "a", "temperature": 1}).message


def test_a_field_of_another_server_may_say_that_nothing_is_wanted() -> None:
    """As `sglang.bench_serving` sends them with each request."""
    for nothing in ({"lora_path": None}, {"lora_path": ""}, {"return_routed_experts": False}, {"what": None}):
        assert len(parse_generate({"input_ids": [1], **nothing}, BARE).prompts) == 1
    for name, value in (("lora_path", "mine"), ("image_data", ["x"]), ("return_routed_experts", 0)):
        wrong = refused({"input_ids": [1], name: value}, BARE)
        assert (wrong.field, "not supported" in wrong.message) == (name, True)
    # A name that nobody knows may be a slip, whatever it says.
    assert "unknown field 'ignore_eos'" in refused({"input_ids": [1], "ignore_eos": False}, BARE).message


def test_rids_given_for_a_batch() -> None:
    assert [p.rid for p in parse_generate({"text": ["a", "b"], "rid": ["x", "y"]}, MODEL).prompts] == [
        "x",
        "y",
    ]
    assert [p.rid for p in parse_generate({"text": ["a", "b"], "rid": "x"}, MODEL).prompts] == ["x_0", "x_1"]
    for rid in (["x"], ["x", "x"], ["x", ""], 5, "", "r" * 257, "\ud800"):
        refused({"text": ["a", "b"], "rid": rid})
    refused({"text": "a", "rid": ["x"]})


def test_made_rids_are_never_the_same_not_even_in_a_forked_process() -> None:
    rids = [make_rid() for _ in range(2 * DRAWN_RIDS + 1)]
    assert all(len(rid) == 32 and set(rid) <= set("0123456789abcdef") for rid in rids)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, "".join(make_rid() for _ in range(DRAWN_RIDS)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as childs:
        said = childs.read()
    rids += [said[at : at + 32] for at in range(0, len(said), 32)]
    rids += [make_rid() for _ in range(DRAWN_RIDS)]
    assert len(rids) == len(set(rids)) == 4 * DRAWN_RIDS + 1


def test_killer_logprob_options_beyond_the_vocabulary() -> None:
    good = parse_generate(
        {"text": "a", "return_logprob": True, "top_logprobs_num": 128, "token_ids_logprob": [0, 999]}, MODEL
    )
    assert good.prompts[0].logprobs.top_logprobs_num == 128
    assert good.prompts[0].logprobs.token_ids_logprob == [0, 999]
    bad: dict[str, list[Any]] = {
        "top_logprobs_num": [129, 1001, -1, 2**40, True, 1.5, "1"],
        "token_ids_logprob": [[1] * 1025, [1000], [-1], [True], 5, "x", [[1]]],
        "logprob_start_len": [-2, 4, 2**70, "0"],
        "return_logprob": [1, "true", []],
        "return_text_in_logprobs": [0],
        "return_hidden_states": ["yes"],
    }
    for name, values in bad.items():
        for value in values:
            assert refused({"text": "a", name: value}).field.startswith(name)


def test_logprob_options_per_prompt() -> None:
    body = {
        "text": ["a", "b"],
        "return_logprob": [True, None],
        "token_ids_logprob": [[1], None],
        "top_logprobs_num": 2,
    }
    first, second = (prompt.logprobs for prompt in parse_generate(body, MODEL).prompts)
    assert (first.return_logprob, second.return_logprob) == (True, False)
    assert (first.token_ids_logprob, second.token_ids_logprob) == ([1], [])
    assert (first.top_logprobs_num, second.top_logprobs_num) == (2, 2)
    assert refused({"text": ["a", "b"], "return_logprob": [True]}).field == "return_logprob"
    assert refused({"text": ["a", "b"], "top_logprobs_num": [1, 2000]}).field == "top_logprobs_num[1]"


def test_what_a_batch_shares_is_one_object_whatever_else_each_prompt_has_of_its_own() -> None:
    ids = list(range(1000)) + [7] * 24
    shared: dict[str, Any] = {
        "text": ["a"] * 1024,
        "token_ids_logprob": ids,
        "return_logprob": True,
        "sampling_params": {"stop": ["END"], "custom_params": {"a": [1, 2]}, "logit_bias": {"5": 1.0}},
    }
    prompts = parse_generate(shared, MODEL).prompts
    assert all(one.logprobs is prompts[0].logprobs for one in prompts)
    assert all(one.params is prompts[0].params for one in prompts)
    assert prompts[0].logprobs.token_ids_logprob == ids
    own: list[tuple[str, list[Any]]] = [
        ("top_logprobs_num", [3, 4] * 512),
        ("return_logprob", [True, None] * 512),
        ("logprob_start_len", [0, -1] * 512),
    ]
    for name, values in own:
        prompts = parse_generate({**shared, name: values}, MODEL).prompts
        assert [getattr(one.logprobs, name) for one in prompts] == [
            False if value is None else value for value in values
        ]
        assert all(one.logprobs.token_ids_logprob is prompts[0].logprobs.token_ids_logprob for one in prompts)


def test_a_server_may_give_more_or_fewer_top_logprobs() -> None:
    for most, vocabulary in ((5, 1000), (500, 1000), (5000, 1000)):
        model = Model(vocab_size=vocabulary, context_length=200, max_top_logprobs=most)
        top = min(most, vocabulary)
        body = {"input_ids": [1], "top_logprobs_num": top}
        assert parse_generate(body, model).prompts[0].logprobs.top_logprobs_num == top
        wrong = refused({"input_ids": [1], "top_logprobs_num": top + 1}, model)
        assert wrong.field == "top_logprobs_num"
        assert f"[0, {top}]" in wrong.message


def test_the_context_holds_prompt_and_output() -> None:
    def one(ids: int, params: dict[str, Any]) -> Ready:
        prompt = parse_generate({"input_ids": [1] * ids, "sampling_params": params}, BARE).prompts[0]
        assert prompt.ids is not None
        return ready(prompt, prompt.ids, True, BARE)

    assert one(100, {"max_new_tokens": 100}).prompt_tokens == 100
    one(199, {"max_new_tokens": None})
    with pytest.raises(BadRequest, match="at most 99 after a prompt of 101"):
        one(101, {"max_new_tokens": 100})
    with pytest.raises(BadRequest, match="maximum context length is 200 tokens"):
        one(200, {"max_new_tokens": None})


def test_a_list_that_is_too_long_is_refused_before_its_entries_are_looked_at() -> None:
    for ids, where in (([None] * 200, "input_ids"), ([[1], [None] * 200], "input_ids[1]")):
        wrong = refused({"input_ids": ids}, BARE)
        assert wrong.field == where
        assert "has 200 tokens; this model's maximum context length is 200 tokens" in wrong.message


def test_the_prompt_tail_is_the_last_64_ids() -> None:
    prompt = parse_generate({"input_ids": list(range(70))}, BARE).prompts[0]
    assert prompt.ids is not None
    done = ready(prompt, prompt.ids, False, BARE)
    assert len(done.input_ids) == 280
    assert done.prompt_tail == done.input_ids[24:]


def test_bad_server_defaults_stop_the_server_not_the_requests() -> None:
    with pytest.raises(BadRequest, match=r"server defaults\.top_p"):
        Model(vocab_size=10, context_length=10, defaults={"top_p": 7})


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nul", b"\xff\xfe", b'{"text": "\\ud800"}', b"[" * 10**6, b'{"a":' * 10**5,
        b'{"a": 1e999}', b"{'a': 1}", b'{"x": NaN, ', b"[NaN" + b"[" * 10**5,
    ],
)  # fmt: skip
def test_what_is_not_json_is_a_400(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_generate(decode_body(body), MODEL)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is empty; send a JSON object"),
        (b" \r\n", "is empty; send a JSON object"),
        (b'\xef\xbb\xbf{"text": "x"}', "a byte order mark; send UTF-8 without one"),
        ('{"text": "x"}'.encode("utf-16"), "a byte order mark; send UTF-8 without one"),
        (b'{"a": ' * 10**5, "nested too deeply"),
        (b'{"a": NaN, "b": ' + b"[" * 10**5, "nested too deeply"),
    ],
)
def test_what_is_often_wrong_with_a_body_is_said(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        decode_body(body)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1"])
@pytest.mark.parametrize("half", [r"\ud800", r"\uDFFF", r"a\uDBffb", r"\udc00\ud800", r"\\\ud800"])
@pytest.mark.parametrize(
    "body",
    [
        '"%s"',
        '["%s"]',
        '{"%s": 1}',
        '{"a": {"b": ["%s"]}}',
        '{"a": [{"%s": []}]}',
        '{"a": [[], ["x", "%s"]]}',
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_is(body: str, half: str, number: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_body(f'{{"x": {number}, "y": {body % half}}}'.encode())
    assert caught.value.message.isascii()


def test_pairs_and_escaped_backslashes_are_text() -> None:
    body = decode_body(rb'{"a": "\ud83d\uDE00", "b": "\\ud800", "\ud83d\ude00": NaN}')
    assert (body["a"], body["b"], set(body)) == ("😀", r"\ud800", {"a", "b", "😀"})


def test_python_numbers_do_not_bring_other_encodings() -> None:
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        with pytest.raises(BadRequest, match="not JSON"):
            decode_body('{"a": NaN}'.encode(encoding))


def test_a_huge_body_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadRequest, match="at most 100"):
        decode_body(b"[" * 101, max_bytes=100)


def test_minus_infinity_is_read_for_a_bias_and_nan_is_named() -> None:
    body = decode_body(b'{"text": "a", "sampling_params": {"logit_bias": {"5": -Infinity}}}')
    assert parse_generate(body, MODEL).prompts[0].params.logit_bias == {"5": -math.inf}
    nan = decode_body(b'{"text": "a", "sampling_params": {"top_p": NaN}}')
    assert refused(nan).field == "sampling_params.top_p"


def test_whole_numbers_of_any_size_reach_their_fields_check() -> None:
    body = {"text": "a", "sampling_params": {"sampling_seed": 10**300}}
    assert refused(decode_body(json.dumps(body).encode())).field == "sampling_params.sampling_seed"
