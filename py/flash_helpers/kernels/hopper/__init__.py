"""The Hopper family: kernels on TMA and ``wgmma``."""
