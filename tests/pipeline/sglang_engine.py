"""What SGLang's own engine answers: run as a script, with a model's directory and a file of requests, JSON.

Prints a JSON list of its answers. Also has what the engine is started with, here and behind an instance.
"""

import json
import sys
from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 16384,
    "max_running_requests": 32,
    "log_level": "error",
}
"""A model of random weights, the same each time, on a CPU."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}

ROTARY = '''"""SGLang takes this one function from vLLM on a CPU."""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    cos, sin = cos_sin_cache[positions.flatten()].to(query.dtype).chunk(2, -1)
    for part in (query, key):
        heads = part.view(positions.numel(), -1, head_size)
        a, b = heads.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        heads.copy_(torch.cat([a * c - b * s, b * c + a * s], -1))
'''


def main() -> None:
    """Answer each request."""
    from sglang.srt.entrypoints.engine import Engine

    model, requests = sys.argv[1:]
    engine = Engine(model_path=model, **OPTIONS)
    answers = [engine.generate(**request) for request in json.loads(Path(requests).read_text("utf-8"))]
    print(json.dumps(answers), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
