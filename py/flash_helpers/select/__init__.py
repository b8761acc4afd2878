"""Which kernel computes a problem, and why: no torch, no GPU."""
