"""The one module that reads environment variables."""

import os


def kernel_set() -> str:
    """``KERNELS``: the set of kernels that ``get_kernel_configs()`` gives when asked for none by name."""
    return os.environ.get("KERNELS", "")
