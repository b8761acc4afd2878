"""Configurations, generation, building, tuning and measuring of the attention kernels.

Importing this package, or any module outside ``flash_helpers.test`` and
``flash_helpers.benchmark``, imports neither torch nor CUDA.
"""

__version__ = "0.1.0"
