"""Outfeed: the response side of an LLM server, run beside the scheduler."""

__version__ = "0.1.0"
