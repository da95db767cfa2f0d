"""SGLang's types, as far as the adapter uses them: its own where it is installed, else stand-ins.

SGLang takes gigabytes, so the suite does not install it. In an environment that has it the same tests hold
the adapter against its real types.
"""

import importlib.util
import sys
from array import array
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

INSTALLED = importlib.util.find_spec("sglang") is not None

COLUMNS = [
    f"{side}_{what}_{part}"
    for side in ("output", "input")
    for what in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
    for part in ("val", "idx")
]


class SamplingParams(msgspec.Struct, kw_only=True, array_like=True):
    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: set[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1 << 30
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    beam_width: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    stop_strs: list[str] | None = None
    stop_regex_strs: list[str] | None = None
    stop_str_max_len: int = 0
    stop_regex_max_len: int = 0
    is_normalized: bool = False

    def __post_init__(self) -> None:
        assert self.is_normalized, "SGLang would take the stops from the clients' fields again"


class BaseReq(msgspec.Struct, tag=True, kw_only=True, array_like=True):
    rid: str | None = None
    http_worker_ipc: str | None = None


class TokenizedGenerateReqInput(BaseReq, kw_only=True):
    input_text: str | None
    input_ids: Any
    input_embeds: Any
    mm_inputs: Any
    token_type_ids: Any
    sampling_params: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    stream: bool
    return_hidden_states: bool | str = False


class AbortReq(BaseReq, kw_only=True):
    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None
    abort_message: str | None = None


class FlushCacheReqInput(BaseReq, kw_only=True):
    timeout_s: float | None = None


class FlushCacheReqOutput(BaseReq, kw_only=True):
    success: bool
    message: str = ""


class GetInternalStateReq(BaseReq, kw_only=True):
    pass


class HookType(Enum):
    REPLACE = "replace"


def _modules() -> dict[str, ModuleType]:
    modules = {}

    def module(name: str, **content: Any) -> None:
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content)

    for package in (
        "sglang",
        "sglang.srt",
        "sglang.srt.managers",
        "sglang.srt.sampling",
        "sglang.srt.plugins",
    ):
        module(package, __path__=[])
    module(
        "sglang.srt.managers.io_struct",
        TokenizedGenerateReqInput=TokenizedGenerateReqInput,
        AbortReq=AbortReq,
        FlushCacheReqInput=FlushCacheReqInput,
        FlushCacheReqOutput=FlushCacheReqOutput,
        GetInternalStateReq=GetInternalStateReq,
    )
    module("sglang.srt.sampling.sampling_params", SamplingParams=SamplingParams)
    flag = SimpleNamespace(get=lambda: False)
    module("sglang.srt.environ", envs=SimpleNamespace(SGLANG_RUST_SERVER=flag))
    registry = SimpleNamespace(register=lambda target, hook, hook_type: None)
    module("sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=HookType)
    return modules


def provide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make SGLang's types importable."""
    if not INSTALLED:
        for name, module in _modules().items():
            monkeypatch.setitem(sys.modules, name, module)


def batch(rids: list[str], ids: list[list[int]], reasons: list[Any] | None = None, **more: Any) -> Any:
    """Return what the scheduler hands over for a step (BatchTokenIDOutput): a row for each rid."""
    fields = dict.fromkeys(COLUMNS) | {"output_hidden_states": None, "prompt_tokens": [1] * len(rids)}
    if INSTALLED:
        from sglang.srt.managers.io_struct import BatchTokenIDOutput

        fields = dict.fromkeys(BatchTokenIDOutput.__struct_fields__) | fields
    fields |= {
        "rids": rids,
        "output_ids": [array("q", row) for row in ids],
        "finished_reasons": reasons or [None] * len(rids),
    }
    found = fields | more
    return BatchTokenIDOutput(**found) if INSTALLED else SimpleNamespace(**found)
