"""The scheduler's side: the one port a scheduler imports, and a replay scheduler that uses it.

Knows the request and step rings. Must not know sinks, HTTP or how a shard decodes.
"""
