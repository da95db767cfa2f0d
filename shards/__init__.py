"""Detokenizer shards: token ids in, text out.

Knows tokenizers, incremental decoding, stop strings and the shard process. Must not know sinks, HTTP or
a scheduler's internals; it meets them only as frames on a ring.
"""
