"""What can go wrong in this room, and says so."""


class TokenizerFileError(ValueError):
    """A tokenizer file is missing, unreadable or no tokenizer."""


class TableError(ValueError):
    """A token table in shared memory is not one that this version can read."""


class BadRegistration(ValueError):
    """A request's decode options cannot be served; the message is fit for the client."""


class Stopped(Exception):
    """The shard was told to stop while it waited for a reader."""


def is_crash(error: BaseException) -> bool:
    """Whether the tokenizer library crashed.

    Its crashes derive from BaseException, under a name that it does not export.
    """
    return type(error).__name__ == "PanicException"
