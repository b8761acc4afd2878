"""Walks the architectures of Transformers: each is built small and compared with its eager attention."""
