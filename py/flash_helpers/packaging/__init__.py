"""Wheels: what they bring compiled, and how they are built."""
