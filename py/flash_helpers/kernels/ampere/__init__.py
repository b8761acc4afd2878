"""The Ampere family: kernels on ``mma.sync``."""
