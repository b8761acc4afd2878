"""Kernels as data: what a kernel computes (traits) and how (one dataclass a family)."""
