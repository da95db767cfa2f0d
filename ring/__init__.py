"""The shared-memory ring and the frames on it.

Knows segments, lanes, consumers, doorbells and the bytes of a frame. Must not know what a tokenizer, a
sink, a sampling parameter or a scheduler is: every other room imports this one, it imports none.
"""
