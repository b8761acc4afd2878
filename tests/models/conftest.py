"""Models load from local files alone, and are skipped where ``transformers`` is not installed."""

from __future__ import annotations

import importlib.util
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

if importlib.util.find_spec("transformers") is not None:
    from attention_interface import register

    register()
