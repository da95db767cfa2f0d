"""The options that say what an instance serves: its model's name and limits, how its requests are checked.

They go into the instance's configuration, never to a gateway, so that every gateway checks alike. `launch`
and `serve` share them; `serve` hands them on to the launcher as they were given.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from ..ring.board import InstanceConfig

MAX_DEFAULTS_BYTES: Final = 32 << 10
"""The board holds 60 kB of configuration."""

_PLAIN: Final = ("context_length", "served_model_name", "slots", "characters_per_token")
"""The options whose value goes into the configuration as it is, under the same name."""


class OptionError(ValueError):
    """An option cannot be used; the message says why and what to do."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser, in a group of their own."""
    group = parser.add_argument_group("the model, as every gateway of the instance sees it")
    default = {name: field.default for name, field in _fields().items()}
    group.add_argument(
        "--context-length",
        type=int,
        default=default["context_length"],
        metavar="N",
        help=f"tokens of prompt and output that the engine can hold (default {default['context_length']})",
    )
    group.add_argument(
        "--served-model-name",
        default=default["served_model_name"],
        metavar="NAME",
        help="what /v1/models calls the model, and answers to who names none (default outfeed)",
    )
    group.add_argument(
        "--slots",
        type=int,
        default=default["slots"],
        metavar="N",
        help=f"requests that each gateway may have at the scheduler at once (default {default['slots']})",
    )
    group.add_argument(
        "--characters-per-token",
        type=float,
        default=default["characters_per_token"],
        metavar="X",
        help="characters that a token's text is taken to have when a stop_regex is weighed (default 8)",
    )
    group.add_argument(
        "--sampling-defaults",
        metavar="FILE",
        help="JSON object of sampling parameters for what a request leaves out (default: none)",
    )
    group.add_argument(
        "--detect-stops",
        action="store_true",
        help="the shards look for stop strings and patterns: for a scheduler that does not",
    )


def model_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options as fields of `InstanceConfig`, whose types have the ranges.

    Raises:
        OptionError: one is out of its range, the sampling defaults cannot be read, or no request could be
            served with them.
    """
    values = {name: getattr(args, name) for name in _PLAIN}
    values["detect_stops"] = args.detect_stops
    if args.sampling_defaults is not None:
        values["sampling_defaults"] = read_sampling_defaults(args.sampling_defaults)
    try:
        msgspec.convert({"instance": "", "tokenizer": "", **values}, InstanceConfig)
    except msgspec.ValidationError as error:
        name = str(error).partition(" - at `$.")[2].rstrip("`")
        raise OptionError(f"--{name.replace('_', '-')} {values.get(name)}: give {_range(name)}") from None
    return values


def model_argv(args: argparse.Namespace) -> list[str]:
    """Write the options as a command line again."""
    argv = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in _PLAIN]
    if args.sampling_defaults is not None:
        argv.append(f"--sampling-defaults={args.sampling_defaults}")
    return [*argv, "--detect-stops"] if args.detect_stops else argv


def read_sampling_defaults(path: str) -> dict[str, Any]:
    """Read a file of sampling parameters and check them as a request's.

    Raises:
        OptionError: it cannot be read, or a parameter cannot be used.
    """
    # A launcher without defaults does without all that checks them.
    from ..ingress.errors import BadRequest
    from ..ingress.sampling import SamplingParams

    where = f"--sampling-defaults {path}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_DEFAULTS_BYTES + 1)
    except OSError as error:
        raise OptionError(f"{where}: cannot be read: {error.strerror}") from None
    too_large = f"{where}: has more than the {MAX_DEFAULTS_BYTES} bytes that an instance can keep"
    if len(data) > MAX_DEFAULTS_BYTES:
        raise OptionError(too_large)
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"{where}: is not JSON: {error}") from None
    if type(found) is not dict:
        raise OptionError(f'{where}: give an object of sampling parameters, as {{"temperature": 0.7}}')
    try:
        # Which ids the vocabulary has is checked by the gateways, who have the tokenizer.
        SamplingParams.parse(found, vocab_size=1 << 31, where=where)
    except BadRequest as error:
        raise OptionError(error.message) from None
    if len(msgspec.json.encode(found)) > MAX_DEFAULTS_BYTES:
        raise OptionError(f"{too_large}, with its numbers written out")  # 1e15 is 1000000000000000.0
    return found


def _range(name: str) -> str:
    match inspect.type_info(_fields()[name].type):
        case inspect.IntType(ge=least, le=most) | inspect.FloatType(ge=least, le=most):
            return f"{least:g} to {most}"
        case inspect.StrType(min_length=least, max_length=most):
            return f"{least} to {most} characters"
        case other:  # pragma: no cover - argparse has seen to it
            return str(other)


def _fields() -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(InstanceConfig)}
