"""Walks the architectures of Transformers: each is built small and compared with its eager attention."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # weights are random: nothing is asked of a hub
