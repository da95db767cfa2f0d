"""Reader and sinks: from the egress ring to the one handler that asked.

Knows frames, per-request sinks, events and how they add up to a response. Must not know tokenizers,
shards' internals or HTTP.
"""
