"""Architectures of Transformers by kind: equal to eager attention, or refused by name.

All of them: ``PYTHONPATH=.:py:tests/integrations python -m transformers_walk [--device cuda]``.
"""

from __future__ import annotations

import sys

import pytest

transformers = pytest.importorskip("transformers", minversion="5")
from transformers_walk.compare import EQUAL, NOT_SMALL, PADDINGS, REFUSED, Finding, walk  # noqa: E402
from transformers_walk.small import model_class_of  # noqa: E402

from flash_attention.compat import transformers as kernels  # noqa: E402

NEWEST = "5.24"  # the tables say what comes of this version; an older one may build a type otherwise
IS_OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, NEWEST.split(".")))
NO_OTHER, OWN_CLASSES = "supports no other attention than its own", "classes of its own"


@pytest.fixture(autouse=True)
def _no_stand_in_for_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests leave a module of that name, which Transformers takes for the package."""
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


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
BY_MODS = {  # each mask of theirs is a kernel of its own on a GPU
    "t5": "biases of positions",
    "paligemma": "a prefix that sees itself",
    "llama4_text": "chunks",
}
NOT_SERVED = {
    "recurrent_gemma": "padding before a token",
    "gpt_neo": OWN_CLASSES,
    "sam_vision_model": OWN_CLASSES,
    "mpt": NO_OTHER,  # ALiBi
}


def says_of(model_type: str) -> str | None:
    """What the installed Transformers itself says against another attention of a type; None: nothing."""
    model_class = model_class_of(model_type)
    if not (model_class._supports_flash_attn or model_class._supports_sdpa):
        return NO_OTHER
    if not model_class._can_set_attn_implementation():
        return OWN_CLASSES
    try:
        model_class.config_class()._attn_implementation = kernels.NAME
    except ValueError as error:  # of a configuration that lists what it takes
        return " ".join(str(error).split())
    return None


def findings_of(model_type: str, device: str) -> list[Finding]:
    findings = list(walk(model_type, device))
    if IS_OLDER and {finding.kind for finding in findings} == {NOT_SMALL}:
        pytest.skip(
            f"Transformers {transformers.__version__} builds no small {model_type}: {findings[0].why}"
        )
    return findings


@pytest.mark.parametrize("model_type", SERVED)
def test_equal_to_eager_attention(model_type: str, device: str) -> None:
    findings = findings_of(model_type, device)
    assert len(findings) in (1, len(PADDINGS))
    said = says_of(model_type) if IS_OLDER else None
    if said is None:
        assert {finding.kind for finding in findings} == {EQUAL}, findings
        return
    for finding in findings:
        assert finding.kind == REFUSED, finding
        assert said in finding.why, finding


@pytest.mark.only_on("cpu")
@pytest.mark.skipif(IS_OLDER, reason="older versions build other masks of these")
@pytest.mark.parametrize("model_type", BY_MODS)
def test_equal_to_eager_attention_by_mods(model_type: str, device: str) -> None:
    findings = findings_of(model_type, device)
    assert len(findings) == len(PADDINGS)
    assert {finding.kind for finding in findings} == {EQUAL}, findings


@pytest.mark.parametrize("model_type", NOT_SERVED)
def test_refused_by_name(model_type: str, device: str) -> None:
    findings = [finding for finding in findings_of(model_type, device) if finding.kind != EQUAL]
    expected: str | None = NOT_SERVED[model_type]
    if IS_OLDER:
        expected = says_of(model_type) or (None if expected in (NO_OTHER, OWN_CLASSES) else expected)
    assert bool(findings) == (expected is not None), findings
    for finding in findings:
        assert finding.kind == REFUSED, finding
        assert str(expected) in finding.why, finding
