"""What an instance is told about its model when it starts, every process of it goes by."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from outfeed.gateway.backend import FrontBackend
from outfeed.gateway.front import Front
from outfeed.ingress.errors import BadRequest, Unavailable
from outfeed.ingress.sampling import CHARACTERS_PER_TOKEN
from outfeed.ring.board import InstanceConfig
from outfeed.ring.instance import leftovers
from outfeed.shards.model_options import add_model_arguments, model_argv, model_values
from outfeed.sidecar import Generate
from outfeed.sink import Done
from tokenizers import Tokenizer

from tests.eventually import until
from tests.instances import unique

from .commands import launched, start_launcher
from .rig import rest_of, running_rig

LONGER_AS_KEPT = b'{"custom_params": {"a": [%b]}}' % b",".join([b"1e15"] * 4090)
"""20 kB as a file; its numbers written out, as an instance keeps them, are 78 kB."""


def test_every_gateway_checks_requests_by_what_the_launcher_was_told(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    defaults = tmp_path / "defaults.json"
    defaults.write_text('{"temperature": 0.5, "max_new_tokens": 7, "stop": ["END"]}', encoding="utf-8")
    told = ["--context-length=40", "--served-model-name=team/tiny", "--slots=2", "--readers=2"]
    told += ["--characters-per-token=64", f"--sampling-defaults={defaults}"]
    with running_rig("model", small_tokenizer, *told) as rig, Front.attach(rig.name, 1) as second:
        for front in (rig.front, second):
            assert FrontBackend(front).name == "team/tiny"
            model = front.model
            assert (model.context_length, model.characters_per_token) == (40, 64)
            assert model.vocab_size == max(rig.tokenizer.get_vocab().values()) + 1
            with pytest.raises(BadRequest, match="max_new_tokens: must be at most 37 after a prompt of 3"):
                asyncio.run(front.submit({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 38}}))
            streams = asyncio.run(front.submit({"input_ids": [[1], [2]]}))
            with pytest.raises(Unavailable, match="all 2 places"):
                asyncio.run(front.submit({"input_ids": [3]}))
            got: list[Generate] = []

            def received(got: list[Generate] = got) -> bool:
                got += [message for message in rig.port.recv() if isinstance(message, Generate)]
                return len(got) == 2

            until("the requests", received)
            for message in got:
                params = message.sampling_params
                assert (params["temperature"], params["max_new_tokens"]) == (0.5, 7)
                assert params["stop_strs"] == ["END"]
            for stream in streams:
                stream.close()


def test_an_instance_that_is_told_nothing_takes_the_defaults(small_tokenizer: Path) -> None:
    with running_rig("model", small_tokenizer) as rig:
        assert rig.front.model.characters_per_token == CHARACTERS_PER_TOKEN
        assert rig.front.model.context_length == 131_072
        assert dict(rig.front.model.defaults) == {}
        assert FrontBackend(rig.front).name == "outfeed"


def test_options_that_are_handed_on_say_the_same(tmp_path: Path) -> None:
    """`serve` writes them as a command line again, for the launcher."""
    defaults = tmp_path / "defaults.json"
    defaults.write_text('{"top_p": 0.5}', encoding="utf-8")
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    own = {field.name: field.default for field in msgspec.structs.fields(InstanceConfig)}
    plain = model_values(parser.parse_args([]))
    assert plain == {name: own[name] for name in plain}
    for argv in (
        [],
        ["--context-length=9", "--served-model-name=--an odd name", "--slots=5", "--detect-stops"],
        ["--characters-per-token=3.5", f"--sampling-defaults={defaults}"],
    ):
        args = parser.parse_args(argv)
        assert model_values(parser.parse_args(model_argv(args))) == model_values(args)


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--context-length=0", None, ["--context-length 0: give 1 to 2147483648"]),
        ("--slots=1048577", None, ["--slots 1048577: give 1 to 1048576"]),
        ("--served-model-name=", None, ["--served-model-name : give 1 to 256 characters"]),
        ("--served-model-name=\udcff", None, ["'\\udcff' is not UTF-8"]),
        ("--characters-per-token=0.5", None, ["--characters-per-token 0.5: give 1 to 65536"]),
        ("--characters-per-token=nan", None, ["--characters-per-token nan"]),
        ("--sampling-defaults=/nowhere/at/all.json", None, ["/nowhere/at/all.json", "cannot be read"]),
        ("--sampling-defaults={file}", b"{", ["{file}", "is not JSON"]),
        ("--sampling-defaults={file}", b"\xff", ["{file}", "is not JSON"]),
        ("--sampling-defaults={file}", b"[" * 30_000, ["{file}", "is not JSON"]),
        ("--sampling-defaults={file}", b"[1]", ["{file}", "an object"]),
        ("--sampling-defaults={file}", b'{"top_p": 7}', ["{file}.top_p", "(0, 1]"]),
        ("--sampling-defaults={file}", b'{"do_sample": true}', ["do_sample", "the known ones"]),
        ("--sampling-defaults={file}", b'{"stop_regex": "(a+)+b"}', ["stop_regex"]),
        ("--sampling-defaults={file}", b" " * 40_000, ["32768 bytes"]),
        ("--sampling-defaults={file}", LONGER_AS_KEPT, ["{file}", "32768 bytes"]),
    ],
)
def test_a_launcher_that_is_told_nonsense_does_not_start(
    small_tokenizer: Path, tmp_path: Path, option: str, content: bytes | None, words: list[str]
) -> None:
    instance = unique("model")
    file = tmp_path / "defaults.json"
    if content is not None:
        file.write_bytes(content)
    launcher = start_launcher(
        instance, "--tokenizer", str(small_tokenizer), option.replace("{file}", str(file))
    )
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 2, out
    assert "Traceback" not in err
    for word in words:
        assert word.replace("{file}", str(file)) in err
    assert leftovers(instance) == []


def test_a_gateway_refuses_defaults_that_its_tokenizer_does_not_know(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    defaults = tmp_path / "defaults.json"
    defaults.write_text(json.dumps({"stop_token_ids": [5_000_000]}), encoding="utf-8")
    instance = unique("model")
    with (
        launched(instance, "--tokenizer", str(small_tokenizer), f"--sampling-defaults={defaults}"),
        pytest.raises(BadRequest, match=r"server defaults\.stop_token_ids: must be token ids in"),
    ):
        Front.attach(instance)


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        ({"stop": "river"}, "The ", "river"),
        ({"stop": ["flows", "iver f"]}, "The r", "iver f"),
        ({"stop_regex": "r[a-z]{4} f"}, "The river f", "r[a-z]{4} f"),
    ],
)
def test_a_stop_ends_its_stream_though_the_scheduler_looks_for_none(
    small_tokenizer: Path, stop: dict[str, Any], text: str, matched: str
) -> None:
    tokenizer = Tokenizer.from_file(str(small_tokenizer))
    ids = tokenizer.encode("The river flows", add_special_tokens=False).ids
    with running_rig("model", small_tokenizer, "--detect-stops") as rig:
        (stopped,) = rig.submit(**stop)
        (other,) = rig.submit()
        for token in ids:
            rig.push([stopped, other], [token])
        got, _, (end,) = rest_of(stopped)
        assert got == text
        assert isinstance(end, Done)
        assert end.event.finish is not None
        assert (end.event.finish.type, end.event.finish.matched) == ("stop", matched)
        until("the abort", lambda: rig.receive() == [] and rig.aborted == [stopped.route])
        assert not rig.port.is_live(stopped.route)
        # Rows that were on their way are dropped; who has no stop hears everything.
        rig.push([stopped, other], ids[:1])
        other.close()
        until("the other abort", lambda: rig.receive() == [] and other.route in rig.aborted)
        assert rig.aborted == [stopped.route, other.route]
