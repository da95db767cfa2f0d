"""Sampling parameters, told in the order the reference tells them: values, order, ranges, known killers."""

import json
import math
from typing import Any

import pytest
from outfeed.ingress.errors import BadRequest, show
from outfeed.ingress.fields import CHECKS, MAX_CUSTOM_CHARACTERS, MAX_CUSTOM_KEY_CHARACTERS, MAX_GRAMMAR_BYTES
from outfeed.ingress.sampling import INTERNAL, TOP_K_ALL, SamplingParams, parse_each

VOCAB = 1000


def parse(obj: Any = None, **options: Any) -> SamplingParams:
    return SamplingParams.parse(obj, vocab_size=VOCAB, **options)


def refused(obj: Any, **options: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(obj, **options)
    assert caught.value.status == 400
    return caught.value


def test_an_empty_object_takes_the_defaults_of_the_field() -> None:
    for params in (parse(), parse({}), parse(dict.fromkeys(set(CHECKS) - {"max_new_tokens"}))):
        assert params.max_new_tokens == 128
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, TOP_K_ALL, 0.0)
        assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (
            0.0,
            0.0,
            1.0,
        )
        assert (params.n, params.min_new_tokens, params.beam_width) == (1, 0, None)
        assert params.skip_special_tokens
        assert params.spaces_between_special_tokens
        assert not params.ignore_eos
        assert not params.no_stop_trim
        assert (params.stop_strs, params.stop_regex_strs, params.stop_token_ids) == ([], [], None)
        assert params.is_normalized


def test_max_new_tokens_null_is_no_limit() -> None:
    assert parse({"max_new_tokens": None}).max_new_tokens is None
    assert parse({"max_new_tokens": None, "min_new_tokens": 5000}).min_new_tokens == 5000


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9, 9.9e-7])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    params = parse({"temperature": temperature, "top_k": 50})
    assert (params.temperature, params.top_k) == (1.0, 1)


def test_top_k_of_minus_one_or_of_the_vocabulary_is_everything() -> None:
    for top_k in (-1, VOCAB, TOP_K_ALL, 10**12, 2**63 - 1):
        assert parse({"top_k": top_k}).top_k == TOP_K_ALL
    assert parse({"top_k": VOCAB - 1}).top_k == VOCAB - 1


def test_aliases_become_lists_and_are_measured_in_bytes() -> None:
    params = parse({"stop": "𓀀", "stop_regex": "ab"})
    assert (params.stop, params.stop_strs, params.stop_str_max_len) == (None, ["𓀀"], 4)
    assert (params.stop_regex, params.stop_regex_strs) == (None, ["ab"])
    assert parse({"stop": ["a", "héé"]}).stop_str_max_len == 5


def test_stop_token_ids_are_a_set_without_nulls() -> None:
    assert parse({"stop_token_ids": [7, None, 3, 7]}).stop_token_ids == [3, 7]
    assert parse({"stop_token_ids": []}).stop_token_ids is None
    assert parse({"stop_token_ids": [None]}).stop_token_ids is None


@pytest.mark.parametrize("field", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_an_empty_grammar_is_none(field: str) -> None:
    assert getattr(parse({field: ""}), field) is None


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "takes at most 1048576 UTF-8 bytes, got 1048577 or more"),
        (
            {"ebnf": "é" * (MAX_GRAMMAR_BYTES // 2) + "a"},
            "takes at most 1048576 UTF-8 bytes, got 1048577 or more",
        ),
        ({"custom_params": {"é" * 257: 1}}, "keys must be strings of at most 256 characters, got "),
        ({"custom_params": {"a": "é" * 65_537}}, "takes at most 65536 characters, got 65537"),
        ({"stop": "é" * 2049}, "takes at most 4096 UTF-8 bytes, got 4098 or more"),
    ],
    ids=["grammar", "grammar beyond ASCII", "custom key", "custom string", "stop beyond ASCII"],
)
def test_a_text_is_measured_in_the_unit_that_the_message_names(obj: dict[str, Any], message: str) -> None:
    assert message in str(refused(obj))


def test_a_text_at_its_limit_is_taken() -> None:
    assert parse({"regex": "é" * (MAX_GRAMMAR_BYTES // 2)}).regex is not None
    params = {"é" * MAX_CUSTOM_KEY_CHARACTERS: "é" * MAX_CUSTOM_CHARACTERS}
    assert parse({"custom_params": params}).custom_params == params


def test_only_one_grammar() -> None:
    assert refused({"regex": "a", "ebnf": "b"}).field == "sampling_params.ebnf"
    parse({"regex": "a", "ebnf": ""})


def test_a_second_run_changes_nothing() -> None:
    params = parse(
        {
            "temperature": 0,
            "top_k": -1,
            "stop": "x",
            "stop_regex": ["ab", "c"],
            "stop_token_ids": [2, 1],
            "regex": "",
        }
    )
    before = params.to_scheduler()
    params.post_init()
    params.normalize()
    params.verify(VOCAB)
    assert params.to_scheduler() == before
    assert "stop" not in before
    assert "stop_regex" not in before
    json.dumps(before)


@pytest.mark.parametrize("field", sorted(INTERNAL))
def test_internal_fields_are_closed_to_clients(field: str) -> None:
    error = refused({field: True})
    assert error.field == f"sampling_params.{field}"
    assert "made by the server" in error.message


def test_an_unknown_field_is_named_with_the_known_ones() -> None:
    error = refused({"temprature": 1})
    assert "'temprature'" in error.message
    assert "temperature, top_p" in error.message


RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("max_new_tokens", [0, 1, 10**9], [-1]),
    ("temperature", [0, 1e-6, 2.5, 100], [-0.1]),
    ("top_p", [1e-9, 1, 1.0], [0, 0.0, -0.0, 1.0001, -1]),
    ("top_k", [-1, 1, 999], [0, -2]),
    ("min_p", [0, 1, 0.5], [-1e-9, 1.1]),
    ("frequency_penalty", [-2, 2, 0.0], [-2.1, 2.1]),
    ("presence_penalty", [-2, 2, 0.0], [-2.1, 2.1]),
    ("repetition_penalty", [1e-3, 2, 1], [0, 0.0, -1, 2.01]),
    ("min_new_tokens", [0, 128], [-1, 129]),
    ("n", [1], [0, 2, -1, 10**6]),
    ("beam_width", [1], [0, 2]),
    ("stream_interval", [1, 50], [0, -1]),
    ("sampling_seed", [0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 10**400]),
    ("stop_token_ids", [[0, 999]], [[1000], [-1]]),
    ("logit_bias", [{"0": 1.5, "999": -100}, {"5": -math.inf}], [{"1000": 1}, {"-1": 1}, {"5": 1e39}]),
]


@pytest.mark.parametrize(("field", "good", "bad"), RANGES, ids=[row[0] for row in RANGES])
def test_the_range_of_each_field(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        parse({field: value})
    for value in bad:
        assert field in refused({field: value}).field


NUMBERS = [name for name in CHECKS if name not in ("stop", "stop_regex", "stop_token_ids")]
WRONG: list[Any] = [[], {"a": [[]]}, object(), b"x", (1,), "12x", {1: 2}, [[[[]]]]]


@pytest.mark.parametrize("field", CHECKS)
def test_a_wrong_type_is_a_400_that_names_the_field(field: str) -> None:
    takes: dict[str, tuple[type, ...]] = {
        "stop": (str, list),
        "stop_regex": (str, list),
        "stop_token_ids": (list, tuple),
    }
    for value in WRONG:
        good = isinstance(value, takes.get(field, ())) or (
            field in ("json_schema", "regex", "ebnf", "structural_tag") and isinstance(value, str)
        )
        if good and value != [[[[]]]]:
            continue
        if field == "stop_token_ids" and value == (1,):
            continue
        assert f"sampling_params.{field}" in refused({field: value}).field


def test_true_is_not_a_number_and_one_is_not_true() -> None:
    for field in ("max_new_tokens", "temperature", "n", "top_k", "sampling_seed"):
        refused({field: True})
    for field in ("ignore_eos", "skip_special_tokens"):
        refused({field: 1})
    refused({"max_new_tokens": 12.0})
    refused({"max_new_tokens": "12"})


@pytest.mark.parametrize(
    "field", [row[0] for row in RANGES if row[0] not in ("logit_bias", "stop_token_ids")]
)
def test_nan_and_infinities_never_pass(field: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        assert refused({field: value}).field == f"sampling_params.{field}"


def test_killer_a_bias_that_is_not_a_finite_f32() -> None:
    for bias in (math.nan, math.inf, 1e39, -1e39, 10**400, "1", True, None, [1]):
        assert refused({"logit_bias": {"5": bias}}).field == "sampling_params.logit_bias[5]"
    for key in ("05", "+5", " 5", "٥", "5.0", "", "1e3", "99999999999999999999"):
        refused({"logit_bias": {key: 1}})
    refused({"logit_bias": {5: 1}})


def test_killer_a_seed_beyond_i64_or_a_string() -> None:
    for seed in (2**63, "42", 1.5, 10**5000):
        assert refused({"sampling_seed": seed}).field == "sampling_params.sampling_seed"


def test_killer_fifty_thousand_stop_strings() -> None:
    parse({"stop": ["x"] * 32})
    assert "at most 32" in refused({"stop": ["x"] * 50_000}).message
    assert "at most 32" in refused({"stop_regex": ["x"] * 33}).message


def test_killer_a_megabyte_of_regex() -> None:
    parse({"stop_regex": "a" * 256})
    for pattern in ("a" * 257, "a" * 1_000_000, "é" * 129):
        assert "256 UTF-8 bytes" in refused({"stop_regex": pattern}).message


def test_killer_a_repeat_that_overflows() -> None:
    refused({"stop_regex": "a{4294967295}"})
    refused({"stop_regex": ["ok", "a{5000000000}"]})


def test_half_a_surrogate_pair_is_refused_everywhere() -> None:
    for obj in (
        {"stop": "\ud800"},
        {"stop_regex": ["a", "\udfff"]},
        {"regex": "\ud800"},
        {"custom_params": {"\ud800": 1}},
        {"custom_params": {"a": "\ud800"}},
        {"\ud800": 1},
    ):
        refused(obj).message.encode()


def test_without_a_tokenizer_text_stops_are_refused() -> None:
    for obj in ({"stop": "a"}, {"stop_regex": "a"}, {"min_new_tokens": 1}):
        assert "needs a tokenizer" in refused(obj, tokenizer_present=False).message
    parse({"stop_token_ids": [1], "min_new_tokens": 0}, tokenizer_present=False)


def test_custom_params_hold_scalars_lists_and_maps_of_scalars() -> None:
    custom = {"a": 1, "b": [1, "x", None, True], "c": {"d": 1.5}}
    assert parse({"custom_params": custom}).custom_params == custom
    for bad in (
        {"a": [[1]]},
        {"a": {"b": [1]}},
        {"a": math.nan},
        {"a": 2**64},
        {1: 2},
        [1],
        {"a": {"b": {"c": 1}}},
    ):
        assert "custom_params" in refused({"custom_params": bad}).field
    refused({"custom_params": {str(i): 1 for i in range(1000)}})
    refused({"custom_params": {"a": [0] * 10_000}})


def test_server_defaults_lie_below_the_clients_values() -> None:
    defaults = {"temperature": 0.6, "max_new_tokens": 32, "top_p": 0.95}
    params = parse({"temperature": 0.1, "max_new_tokens": None, "top_p": None}, defaults=defaults)
    assert (params.temperature, params.max_new_tokens, params.top_p) == (0.1, None, 0.95)
    assert parse(None, defaults=defaults).max_new_tokens == 32


def test_a_list_has_one_entry_per_prompt_and_messages_number_them() -> None:
    first, second = parse_each([{"n": 1}, {"top_p": 0.5}], 2, vocab_size=VOCAB)
    assert (first.top_p, second.top_p) == (1.0, 0.5)
    with pytest.raises(BadRequest) as caught:
        parse_each([{}, {"top_p": 5}], 2, vocab_size=VOCAB)
    assert caught.value.field == "sampling_params[1].top_p"
    with pytest.raises(BadRequest, match="list of 3"):
        parse_each([{}, {}], 3, vocab_size=VOCAB)
    assert len(parse_each({"top_p": 0.5}, 3, vocab_size=VOCAB)) == 3


def test_what_a_message_shows_is_short_whatever_the_value() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, 10**100_000, "x" * 10**6, "\ud800", {"a": deep}, b"x", math.nan):
        assert len(show(value)) < 120
        show(value).encode()
