"""Measure kernels against the best peers: correctness first, in one process, in random order.

``bench`` is the function behind ``flash-attention bench``; importing this package imports torch.
"""

from flash_helpers.benchmark.results import Results, Row, check_same_card
from flash_helpers.benchmark.runner import bench
from flash_helpers.problem import Problem

__all__ = ["Problem", "Results", "Row", "bench", "check_same_card"]
