"""The options of `serve` and of a gateway: handed on as they were given, or refused by name."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from outfeed.gateway.server import ServerError, add_gateway_arguments, gateway_options, keys

from .conftest import LIMIT_S

SERVE = Path(__file__).parents[2] / "scripts" / "serve.py"


def test_the_gateways_options_are_handed_on_as_they_were_given() -> None:
    parser = argparse.ArgumentParser()
    add_gateway_arguments(parser)
    given = parser.parse_args(
        [
            *("--host=::1", "--incremental", "--chat-template=t", "--drain-seconds=1.5"),
            *("--max-body-bytes=1", "--max-answer-bytes=2", "--max-requests=3", "--max-connections=4"),
            *("--idle-seconds=5.5", "--max-top-logprobs=6"),
        ]
    )
    assert parser.parse_args(gateway_options(given)) == given
    plain = parser.parse_args([])
    assert parser.parse_args(gateway_options(plain)) == plain


@pytest.mark.parametrize("port", ["-1", "65536", "99999", "http"])
def test_a_port_out_of_range_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_gateway_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--port={port}"])
    assert f"argument --port: '{port}' is no port: give 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--max-requests=0", "'0' is no limit: give a whole number above 0"),
        ("--max-connections=2.5", "'2.5' is no limit: give a whole number above 0"),
        ("--max-answer-bytes=-1", "'-1' is no limit: give a whole number above 0"),
        ("--idle-seconds=nan", "'nan' is no limit: give a number above 0"),
        ("--max-top-logprobs=-1", "'-1' is no count: give 0 or more"),
    ],
)
def test_a_limit_that_is_none_is_refused_by_its_option(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_gateway_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([option])
    assert f"argument {option.partition('=')[0]}: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["api", "admin"])
@pytest.mark.parametrize("given", ["option", "environment"])
@pytest.mark.parametrize("key", ["secret\n", " secret", "\t", "sec\x7fret", "s\udcffcret"])
def test_a_key_that_no_client_can_send_is_refused(
    which: str, given: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file with a line end, mostly: whoever sent what is meant would be told that it is wrong."""
    parser = argparse.ArgumentParser()
    add_gateway_arguments(parser)
    args = parser.parse_args([f"--{which}-key={key}"] if given == "option" else [])
    if given == "environment":
        monkeypatch.setenv(f"OUTFEED_{which.upper()}_KEY", key)
    with pytest.raises(ServerError, match=f"--{which}-key .* no client can send") as refused:
        keys(args)
    assert "cret" not in str(refused.value)
    monkeypatch.undo()
    assert keys(parser.parse_args(["--api-key=a b", "--admin-key=c"])) == ("a b", "c")


def test_what_the_launcher_says_has_one_name_in_front() -> None:
    command = [sys.executable, str(SERVE), "--port", "0", "--instance", "No"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("serve: instance id 'No' is not usable")
