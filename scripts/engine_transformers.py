"""An engine, as an example: a causal LM of `transformers` with continuous batching behind a SchedulerPort.

Attaches to a running instance and decodes on the CPU. Every step runs all requests of the batch through the
model once; requests join after a prefill of their own and leave when they end. Without `--model` the model is
a tiny one with random weights for the instance's tokenizer, so that it runs offline and talks nonsense.

    ./scripts/serve --no-replay                 and      ./scripts/engine
    ./scripts/serve --no-replay --tokenizer DIR and      ./scripts/engine --model DIR

Honours temperature, top_k, top_p, min_p, logit_bias, sampling_seed, limits, stop tokens, strings and
patterns; gives output log probabilities. What it cannot do (penalties, grammars) is refused with a 400.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import signal
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from outfeed.ring import logs
from outfeed.sidecar import (
    Abort,
    Control,
    Family,
    FinishReason,
    Generate,
    Kind,
    RingError,
    SchedulerPort,
    flat_family,
    ragged_family,
)
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

PUSH_WAIT_S = 60.0
REFUSED = {
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None,
}  # fmt: skip


@dataclass(slots=True)
class Running:
    """One request in the batch."""

    request: Generate
    limit: int
    stops: frozenset[int]
    patterns: list[tuple[str, re.Pattern[str]]]
    random: torch.Generator
    ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Generate, room: int, eos: frozenset[int]) -> Running:
        """Read a request's parameters; `room` is how many tokens the model's context leaves it."""
        params = request.sampling_params
        strings = [(stop, re.compile(re.escape(stop))) for stop in params["stop_strs"] or ()]
        patterns = [(stop, re.compile(stop)) for stop in params["stop_regex_strs"] or ()]
        random = torch.Generator()
        seed = params["sampling_seed"]
        random.manual_seed(seed) if seed is not None else random.seed()
        limit = params["max_new_tokens"]
        stops = frozenset(params["stop_token_ids"] or ()) | (frozenset() if params["ignore_eos"] else eos)
        return cls(request, room if limit is None else min(limit, room), stops, strings + patterns, random)

    def sample(self, logits: torch.Tensor) -> int:
        """Choose the next token from f32[vocabulary]."""
        params = self.request.sampling_params
        for token, bias in (params["logit_bias"] or {}).items():
            logits[int(token)] += bias
        if len(self.ids) < params["min_new_tokens"]:
            logits[list(self.stops)] = -math.inf
        if params["top_k"] == 1:
            return int(logits.argmax())
        probs = (logits / params["temperature"]).softmax(-1)
        probs, order = probs.topk(min(params["top_k"], probs.numel()))
        # Best first: what the tokens before it do not fill up to top_p is kept, the best one always.
        probs[(probs.cumsum(-1) - probs) >= params["top_p"]] = 0
        probs[probs < params["min_p"] * probs[0]] = 0
        return int(order[probs.multinomial(1, generator=self.random)])

    def take(self, token: int, tokenizer: Any) -> FinishReason | None:
        """Add a token; say why the request ends with it, if it does."""
        params = self.request.sampling_params
        self.ids.append(token)
        if len(self.ids) >= params["min_new_tokens"]:
            if token in self.stops:
                return FinishReason.stop(token)
            # In tokens: strings are measured in bytes, patterns in characters of at most 4 bytes each.
            reach = max(params["stop_str_max_len"], 4 * params["stop_regex_max_len"]) + 4
            if self.patterns and (stop := self.found(reach, tokenizer)) is not None:
                return FinishReason.stop(stop)
        return FinishReason.length(len(self.ids)) if len(self.ids) >= self.limit else None

    def found(self, reach: int, tokenizer: Any) -> str | None:
        """Return the stop that is in the last `reach` tokens' text, if there is one."""
        skip = self.request.sampling_params["skip_special_tokens"]
        # As much again stands before it: `^`, `\b` and look-behinds must not take a middle for a beginning.
        tail = tokenizer.decode(self.ids[-2 * reach :], skip_special_tokens=skip)
        known = tokenizer.decode(self.ids[-2 * reach : -reach], skip_special_tokens=skip)
        begin = next((k for k, (a, b) in enumerate(zip(known, tail, strict=False)) if a != b), len(known))
        return next((stop for stop, pattern in self.patterns if pattern.search(tail, begin)), None)


class Model:
    """The model and the batch's key-value cache: rows in order, padded on the left to one length."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        # The cache's parameter has been renamed in transformers 5.
        named = "cache" in inspect.signature(model.forward).parameters
        self._argument = "cache" if named else "past_key_values"
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        config = model.config
        self.context = int(getattr(config, "max_position_embeddings", 1 << 30))
        eos = config.eos_token_id
        self.eos = frozenset([eos] if isinstance(eos, int) else eos or ())

    def join(self, prompt: np.ndarray) -> torch.Tensor:
        """Run a prompt (i32[n]) and add it as the last row; return its next logits, f32[vocabulary]."""
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        cache, mask = DynamicCache(), torch.ones_like(ids)
        logits = self._forward(ids, cache, mask)
        if not self._mask.shape[0]:
            self._cache, self._mask = cache, mask
            return logits[0]
        width = max(self._mask.shape[1], mask.shape[1])
        merged = DynamicCache()
        for number, (old, new) in enumerate(zip(self._cache.layers, cache.layers, strict=True)):
            keys = torch.cat([_widen(old.keys, width, 2), _widen(new.keys, width, 2)])
            values = torch.cat([_widen(old.values, width, 2), _widen(new.values, width, 2)])
            merged.update(keys, values, number)
        self._cache = merged
        self._mask = torch.cat([_widen(self._mask, width, 1), _widen(mask, width, 1)])
        return logits[0]

    def step(self, last: list[int]) -> torch.Tensor:
        """Run one token of each row; return the next logits, f32[rows, vocabulary]."""
        self._mask = torch.cat([self._mask, torch.ones(len(last), 1, dtype=torch.long)], dim=1)
        return self._forward(torch.tensor(last)[:, None], self._cache, self._mask)

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these, and what is then padding in every row."""
        mask = self._mask[rows]
        start = int(mask.any(0).long().argmax()) if rows else 0
        kept = DynamicCache()
        for number, layer in enumerate(self._cache.layers if rows else ()):
            kept.update(layer.keys[rows][:, :, start:], layer.values[rows][:, :, start:], number)
        self._cache, self._mask = kept, mask[:, start:]

    def _forward(self, ids: torch.Tensor, cache: DynamicCache, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._argument: cache},
        )
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits


def _widen(tensor: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """Pad `tensor` with zeros in front of dimension `dim`, up to `width`."""
    shape = list(tensor.shape)
    shape[dim] = width - shape[dim]
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim)


class Engine:
    """Requests in, steps out."""

    def __init__(self, port: SchedulerPort, model: Model, tokenizer: Any, rows: int) -> None:
        self._port = port
        self._model = model
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        self._rows = rows
        self._waiting: deque[Generate] = deque()
        self._batch: list[Running] = []

    def turn(self) -> None:
        """Receive, then decode one step, or sleep when there is nothing to decode."""
        for message in self._port.recv():
            match message:
                case Generate():
                    self._waiting.append(message)
                case Abort(route=route):
                    self._waiting = deque(entry for entry in self._waiting if entry.route != route)
                    self._leave({row for row, run in enumerate(self._batch) if run.request.route == route})
                case Control(route=route, op="health"):
                    self._port.push_result(route, b'{"healthy":true}', timeout=PUSH_WAIT_S)
                case Control(route=route, op=op):
                    why = f"operation {op!r} is unknown: use health"
                    self._port.push_error(route, 400, "BadRequest", why, timeout=PUSH_WAIT_S)
        if self._batch:
            self._push(self._batch, self._model.step([run.ids[-1] for run in self._batch]))
        if self._waiting and len(self._batch) < self._rows:
            self._admit(self._waiting.popleft())
        elif not self._batch:
            self._port.wait(0.5)

    def _admit(self, request: Generate) -> None:
        """Prefill one request (one a turn, so that those who run go on) and push its first token."""
        params = request.sampling_params
        prompt = np.frombuffer(request.input_ids, dtype="<i4")
        room = self._model.context - len(prompt)
        faults = [f"this engine has no {name}" for name, plain in REFUSED.items() if params[name] != plain]
        if room < 1 or not len(prompt):
            faults.append(f"a prompt of {len(prompt)} tokens; give 1 to {self._model.context - 1}")
        if faults:
            self._port.push_error(request.route, 400, "BadRequest", faults[0], timeout=PUSH_WAIT_S)
            return
        run = Running.of(request, room, self._model.eos)
        if run.limit == 0:
            end = {0: FinishReason.length(0)}
            self._port.push_tokens([request.route], [], [0], finishes=end, timeout=PUSH_WAIT_S)
            return
        self._batch.append(run)
        self._push([run], self._model.join(prompt)[None])

    def _push(self, runs: list[Running], logits: torch.Tensor) -> None:
        """Sample a token for each of `runs` (the batch, or its last), push them, drop who has ended."""
        logits[:, self._vocabulary :] = -math.inf
        logprobs = {
            row: logits[row].log_softmax(-1)
            for row, run in enumerate(runs)
            if run.request.logprobs.return_logprob
        }
        tokens = [run.sample(logits[row]) for row, run in enumerate(runs)]
        finishes = {
            row: reason
            for row, (run, token) in enumerate(zip(runs, tokens, strict=True))
            if (reason := run.take(token, self._tokenizer)) is not None
        }
        routes = np.array([run.request.route for run in runs], dtype=np.uint64)
        self._port.push_tokens(
            routes,
            np.array(tokens, dtype=np.int32),
            finishes=finishes,
            families=_families(runs, tokens, logprobs) if logprobs else None,
            timeout=PUSH_WAIT_S,
        )
        self._leave({len(self._batch) - len(runs) + row for row in finishes})

    def _leave(self, rows: set[int]) -> None:
        if rows:
            stay = [row for row in range(len(self._batch)) if row not in rows]
            self._model.keep(stay)
            self._batch = [self._batch[row] for row in stay]


def _families(
    runs: list[Running], tokens: list[int], logprobs: dict[int, torch.Tensor]
) -> dict[Kind, Family | None]:
    """Return the log probabilities that were asked for: natural, of the model's own distribution."""
    top, named = [], []
    for row, values in logprobs.items():
        wanted = runs[row].request.logprobs
        if wanted.top_logprobs_num:
            best = values.topk(wanted.top_logprobs_num)
            top.append((row, [(best.values.numpy(), best.indices.numpy())]))
        if wanted.token_ids_logprob:
            named.append((row, [(values[wanted.token_ids_logprob].numpy(), wanted.token_ids_logprob)]))
    return {
        Kind.OUTPUT_LOGPROBS: flat_family(
            (row, [float(values[tokens[row]])], [tokens[row]]) for row, values in logprobs.items()
        ),
        Kind.OUTPUT_TOP_LOGPROBS: ragged_family(top),
        Kind.OUTPUT_IDS_LOGPROBS: ragged_family(named),
    }


def load_model(path: str | None, vocabulary: int, seed: int) -> Any:
    """Load the model in a directory, or make a tiny one of random weights; nothing is downloaded."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
            bos_token_id=None, eos_token_id=None, initializer_range=0.5,
        )
    )  # fmt: skip


def main() -> int:
    """Serve until SIGTERM, Ctrl-C or the end of the instance."""
    parser = argparse.ArgumentParser(prog="engine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instance", default="outfeed", help="the running instance (default: outfeed)")
    parser.add_argument("--model", metavar="DIR", help="a causal LM's directory (default: tiny, random)")
    parser.add_argument("--batch", type=int, default=16, help="requests decoded at once (default 16)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--seed", type=int, default=0, help="decides the random weights (default 0)")
    args = parser.parse_args()
    logs.start("engine")
    if args.threads:
        torch.set_num_threads(args.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with torch.inference_mode(), SchedulerPort.attach(args.instance) as port:
            tokenizer = Tokenizer.from_file(port.config.tokenizer)
            vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
            model = Model(load_model(args.model, vocabulary, args.seed))
            engine = Engine(port, model, tokenizer, args.batch)
            print(f"engine: serving {args.instance!r}", flush=True)
            while port.alive:
                engine.turn()
    except (RingError, OSError, ValueError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
