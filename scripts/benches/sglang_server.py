"""SGLang's Rust server under a scripted scheduler, as a peer for the `http` benchmark.

Needs only the extension module inside the public wheel (sglang 0.5.23, `_server.cpython-*.so`), no GPU and no
model. Run as a process: it serves on a port and answers every request with the ids of a real text, one
token per request and step, as fast as it can; it prints `ready` and ends with SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
from array import array
from pathlib import Path
from typing import Any

import msgspec

NAME = "sglang.srt.rust_extensions._server"
PARAMS_FROM = 25
"""A request's header holds its sampling parameters as the one list longer than this."""


def load(path: str) -> Any:
    """Import the extension module from its file, under the name it was built for."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_server(module: Any, tokenizer: str, port: int, shards: int) -> Any:
    """Start the server on 127.0.0.1 with `shards` detokenizer threads and incremental streams."""
    length = 131_072
    model = module.ModelConfig(
        context_len=length,
        vocab_size=151_936,
        is_multimodal=False,
        model_type="qwen3",
        default_sampling_params=module.DefaultSamplingParams(),
    )
    names = {
        "model_path": tokenizer,
        "served_model_name": "m",
        "tokenizer_path": tokenizer,
        "version": "0.5.23",
    }
    off = dict.fromkeys(
        (
            "skip_tokenizer_init",
            "stream_response_default_include_usage",
            "enable_request_header_overrides",
            "enable_strict_thinking",
            "allow_auto_truncate",
            "enable_return_hidden_states",
        ),
        False,
    )
    absent = dict.fromkeys(
        (
            "revision",
            "hicache_storage_backend",
            "hicache_storage_backend_extra_config",
            "grpc_port",
            "chat_template",
            "tool_call_parser",
            "reasoning_parser",
            "default_priority_value",
            "preferred_sampling_params",
            "load_snapshot_path",
            "metrics",
        )
    )
    return module.Server(
        module.ServerArgs(
            **names,
            **off,
            **absent,
            load_format="auto",
            weight_version="default",
            hicache_storage_prefetch_policy="best_effort",
            hicache_write_policy="write_through",
            host="127.0.0.1",
            port=port,
            log_level="error",
            log_level_http="error",
            default_chat_template_kwargs="{}",
            tokenizer_worker_num=1,
            detokenizer_worker_num=shards,
            skip_server_warmup=True,
            health_generate_headers={},
            incremental_streaming_output=True,
            disaggregation_mode=module.DisaggregationMode.Null,
            model_config=model,
            default_max_new_tokens=128,
            lora_ids={},
            limit_mm_data_per_request=[],
            num_reserved_tokens=0,
            tokenizer_model_max_length=length,
            max_total_num_tokens=1_000_000,
            deployment_info="{}",
            launch_server_info="{}",
            load_snapshot_dp_size=0,
            load_snapshot_dp_rank=0,
            accelerator="cpu",
            num_accelerators=1,
        )
    )


class Schedule:
    """The scripted scheduler: every running request gets its next token in each step."""

    def __init__(self, server: Any, corpus: list[int]) -> None:
        self._server = server
        self._corpus = corpus
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder().decode
        self._running: dict[str, list[int]] = {}  # rid → place in the corpus, tokens so far, limit

    def turn(self) -> None:
        """Take in requests, then push a step."""
        if not self._running:
            self._server.wait_request(1000)
        for request in self._server.recv_requests(1024):
            header = self._decode(request.header)
            params = next((one for one in header if isinstance(one, list) and len(one) > PARAMS_FROM), None)
            if params is not None:
                self._running[header[1]] = [hash(header[1]) % len(self._corpus), 0, params[0] or 128]
        if self._running:
            self._step()

    def _step(self) -> None:
        rids, size = list(self._running), len(self._corpus)
        ids: list[array[int]] = []
        finishes: list[dict[str, Any] | None] = []
        for rid in rids:
            state = self._running[rid]
            ids.append(array("q", [self._corpus[(state[0] + state[1]) % size]]))
            state[1] += 1
            over = state[1] >= state[2]
            finishes.append({"type": "length", "length": state[2]} if over else None)
            if over:
                del self._running[rid]
        rows = len(rids)
        header = self._encode([rids, finishes, [1] * rows, [1] * rows, [0] * rows, [0] * rows])
        self._server.push_decode_result_batch(header, [b"".join(map(array.tobytes, ids))])


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--module", required=True)
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json and its config")
    parser.add_argument("--text", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--shards", type=int, default=2)
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = make_server(load(args.module), args.tokenizer, args.port, args.shards)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json"))
    corpus = tokenizer.encode(Path(args.text).read_text(encoding="utf-8")).ids
    print("ready", flush=True)
    schedule = Schedule(server, corpus)
    while True:
        schedule.turn()


if __name__ == "__main__":
    main()
