"""Architectures of Transformers by kind: equal to eager attention, or refused by name.

All of them: ``PYTHONPATH=.:py:tests/integrations python -m transformers_walk [--device cuda]``.
"""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers", minversion="5")
from transformers_walk.compare import EQUAL, PADDINGS, REFUSED, walk  # noqa: E402

SERVED = {
    "llama": "a decoder",
    "mistral": "a sliding window in all layers",
    "gemma2": "a soft cap, and windows in every other layer",
    "gemma3_text": "windows and full attention by layer",
    "cohere2": "layers without rotary embedding",
    "gpt2": "one projection for q, k and v",
    "gpt_bigcode": "one head for keys and values",
    "gptj": "a rotation of a part of each head",
    "opt": "learnt positions that start at two",
    "mixtral": "experts",
    "gpt_oss": "sinks",
    "deepseek_v3": "heads of v that are smaller than those of q",
    "qwen3_next": "recurrent layers between those of attention",
    "bert": "an encoder",
    "roberta": "positions that start behind the padding",
    "modernbert": "an encoder with windows on both sides",
    "esmc": "an encoder of proteins",
    "bart": "an encoder and a decoder",
    "whisper": "an encoder of sounds and a decoder",
    "vit": "an encoder of images",
    "clip": "texts and images",
    "siglip_vision_model": "an encoder of images without a class token",
    "wav2vec2": "an encoder of waves",
    "llava": "a decoder that takes images",
    "qwen2_vl": "rotations in three dimensions",
    "qwen3_vl_vision": "packed images of an encoder",
}
NOT_SERVED = {
    "t5": "supports no flash attention",  # position_bias
    "recurrent_gemma": "padding before a token",
    "gpt_neo": "classes of its own",
    "mpt": "supports no flash attention",  # ALiBi
    "paligemma": "supports no flash attention",  # a prefix that sees itself
}


@pytest.mark.parametrize("model_type", SERVED)
def test_equal_to_eager_attention(model_type: str, device: str) -> None:
    findings = list(walk(model_type, device))
    assert len(findings) in (1, len(PADDINGS))
    assert {finding.kind for finding in findings} == {EQUAL}, findings


@pytest.mark.parametrize("model_type", NOT_SERVED)
def test_refused_by_name(model_type: str, device: str) -> None:
    findings = [finding for finding in walk(model_type, device) if finding.kind != EQUAL]
    assert findings
    for finding in findings:
        assert finding.kind == REFUSED, finding
        assert NOT_SERVED[model_type] in finding.why, finding
