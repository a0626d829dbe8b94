"""The package's exceptions. Every message names the operation, the argument, what came and what is valid."""


class BitsAndBytesError(Exception):
    """Base of everything this package raises on purpose."""


class ArgumentError(BitsAndBytesError, ValueError):
    """An argument that an operation cannot take; raised before any memory is read or written."""

    def __init__(self, op: str, argument: str, valid: str, got: object):
        super().__init__(f"{op}: {argument} must be {valid}, got {got}")
        self.op = op
        self.argument = argument


class UnsupportedError(BitsAndBytesError, NotImplementedError):
    """A call that is well formed but that no implementation here can run; the message says why and what works."""


class UnsupportedArgumentError(UnsupportedError, ValueError):
    """An argument that is valid elsewhere: an option that no update rule here honours, a dtype that a chip lacks."""


class NotQuantizedError(BitsAndBytesError, RuntimeError):
    """A quantised layer whose weight was not quantised yet; moving it to a device does that."""


class BackendUnavailableError(BitsAndBytesError, RuntimeError):
    """A backend that cannot be used here; the message says why."""


class NativeError(BitsAndBytesError, RuntimeError):
    """A native kernel refused a call that had passed the operator's checks."""
