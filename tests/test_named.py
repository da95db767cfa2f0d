"""`./scripts/bench` and `./scripts/stress`: one runs by its name, wherever the name stands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
COMMANDS = {"bench": "benches", "stress": "stresses"}


def run(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPTS / f"{command}.py", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def names(command: str) -> list[str]:
    """The modules that have a `run`, as the command has to list them."""
    paths = (SCRIPTS / COMMANDS[command]).glob("*.py")
    return sorted(path.stem for path in paths if "\ndef run(" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("words", [[], ["--help"]], ids=["no name", "help"])
@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_name_all_are_listed(command: str, words: list[str]) -> None:
    done = run(command, *words)
    assert (done.returncode, done.stderr) == (0, "")
    listed = done.stdout.partition("names:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == names(command)
    assert all(len(line.split()) > 3 and line.endswith(".") for line in listed), "each a whole sentence"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_name_says_which_there_are(command: str) -> None:
    done = run(command, "--json", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{command}: no 'nonsense'; there are: {', '.join(names(command))}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_said(command: str) -> None:
    done = run(command, "--nonsense")
    assert done.returncode == 2
    assert "unrecognized arguments: --nonsense" in done.stderr


def test_a_name_may_come_after_the_options() -> None:
    done = run("stress", "--seconds", "0.2", "--json", "batch")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_a_stress_has_options_of_its_own() -> None:
    done = run("stress", "--objects", "7", "sampling", "--help")
    assert done.returncode == 0
    assert "--objects" in done.stdout


@pytest.mark.parametrize(
    ("command", "name", "option"),
    [
        ("stress", "batch", "--seconds=nan"),
        ("stress", "batch", "--seconds=-1"),
        ("stress", "batch", "--seconds=inf"),
        ("stress", "batch", "--seed=-1"),
        ("stress", "regex", "--bombs=2"),
        ("stress", "sampling", "--objects=0"),
        ("stress", "http", "--streams=0"),
        ("stress", "http", "--ranks=65"),
        ("bench", "http", "--tokens=0"),
        ("bench", "http", "--streams=-1"),
        ("bench", "http", "--shards=0"),
    ],
)
def test_a_number_out_of_its_range_is_said_before_anything_runs(command: str, name: str, option: str) -> None:
    done = run(command, name, option)
    assert (done.returncode, done.stdout) == (2, "")
    said = done.stderr.splitlines()[-1]
    which, _, value = option.partition("=")
    assert said.startswith(f"{command}: error: argument {which}: '{value}' cannot be used: give a ")
