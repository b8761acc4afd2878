"""Errors that a caller may want to tell apart. Bad arguments raise Python's own ValueError and TypeError."""


class InfeasibleConfigError(ValueError):
    """The configuration cannot run: on any device, or on the one that holds the tensors."""


class UnsupportedDeviceError(RuntimeError):
    """The GPU is older than compute capability 8.0."""
