"""What selection raises."""


class NoKernelError(NotImplementedError):
    """No kernel computes the problem on this device: a feature or a head size that none is made for."""
