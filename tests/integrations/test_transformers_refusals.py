"""What Transformers may pass to an attention function: each keyword is applied or refused by its name."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import sdpa

transformers = pytest.importorskip("transformers")
kernels = pytest.importorskip("flash_attention.integrations.transformers")

TAKEN = set(inspect.signature(kernels.attention_forward).parameters)
ATTENTIONS = {"attention_interface", "attention_function", "attn_interface", "eager_attention_forward"}
# Parameters of eager attention functions that their call sites pass by place, and not by these names.
BY_PLACE = {"module", "query", "key", "value", "query_states", "key_states", "value_states", "q", "k", "v"}

# Keywords that have a meaning, and a model that passes each: what a Transformers without it does not pass.
PASSED_BY = {
    "sinks": "inkling2",
}
MODELS = Path(transformers.__file__).parent / "models"


def keywords_of_models() -> list[str]:
    """Each keyword that a model of Transformers passes to an attention function, or that one of its eager
    attention functions names."""
    names: set[str] = set()
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if called in ATTENTIONS:
                    names.update(keyword.arg for keyword in node.keywords if keyword.arg)
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("eager_attention"):
                names.update(x.arg for x in [*node.args.args, *node.args.kwonlyargs])
    return sorted(names - BY_PLACE)


class Layer(torch.nn.Module):
    is_causal = True


def heads(seq_len: int = 9) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, 2, seq_len, 16, generator=generator, device="cpu").half()
    return x.to(torch.get_default_device())


@pytest.fixture(scope="module")
def keywords() -> list[str]:
    found = keywords_of_models()
    assert {"scaling", "dropout", "sliding_window", "s_aux", "softcap"} <= set(found)
    return found


def test_each_keyword_of_a_model_is_taken_or_refused_by_its_name(keywords: list[str]) -> None:
    x = heads()
    harmless = {"position_embeddings"}  # the latter of ModernBERT, in 5.0
    refused = set()
    for name in set(keywords) - TAKEN - harmless:
        value = True if name == "output_attentions" else torch.ones(1, 2, 9, 9)
        with pytest.raises(NotImplementedError, match=rf"^{name} is"):
            kernels.attention_forward(Layer().eval(), x, x, x, None, **{name: value})
        kernels.attention_forward(Layer().eval(), x, x, x, None, **{name: None})
        refused.add(name)
    if transformers.__version__ >= "5":
        assert {name for name, model in PASSED_BY.items() if (MODELS / model).is_dir()} <= refused
    else:
        assert "head_mask" in refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sinks", torch.zeros(2, device="cpu")),
        ("indices_of_pages", torch.zeros(1, 9, 4, dtype=torch.int64, device="cpu")),
        ("head_mask", torch.ones(2, device="cpu")),
        ("block_table", torch.zeros(1, 4, dtype=torch.int32, device="cpu")),
        ("k_cache", torch.zeros(4, 16, 2, 16, device="cpu")),
        ("cache", object()),
        ("alibi", 0),
        ("a_keyword_of_tomorrow", False),
    ],
)
def test_what_may_mean_something_is_refused(name: str, value: Any) -> None:
    x = heads()
    with pytest.raises(NotImplementedError, match=rf"^{name} is"):
        kernels.attention_forward(Layer(), x, x, x, None, **{name: value})


@pytest.mark.parametrize("name", ["use_cache", "output_hidden_states", "num_items_in_batch"])
def test_what_means_nothing_to_attention_changes_nothing(name: str) -> None:
    x = heads()
    out, _ = kernels.attention_forward(Layer(), x, x, x, None, **{name: True})
    plain, _ = kernels.attention_forward(Layer(), x, x, x, None)
    assert torch.equal(out, plain)


@pytest.mark.only_on("cpu")
def test_dropout_is_that_of_training_and_nothing_in_evaluation() -> None:
    x = heads()
    torch.manual_seed(4)
    out, _ = kernels.attention_forward(Layer().train(), x, x, x, None, dropout=0.1)
    torch.manual_seed(4)
    by_name = sdpa(x, x, x, dropout_p=0.1, is_causal=True).transpose(1, 2)
    assert torch.equal(out, by_name)
    out, _ = kernels.attention_forward(Layer().eval(), x, x, x, None, dropout=0.1)
    assert torch.equal(out, kernels.attention_forward(Layer().eval(), x, x, x, None)[0])


def test_a_layer_that_says_nothing_of_causality_is_refused() -> None:
    x = heads()
    with pytest.raises(NotImplementedError, match="nothing says whether the attention of Module is causal"):
        kernels.attention_forward(torch.nn.Module(), x, x, x, None)
    kernels.attention_forward(torch.nn.Module(), x, x, x, None, is_causal=True)


@pytest.mark.parametrize("shape", [(1, 1, 9, 8), (1, 3, 9, 9), (9,), (2, 9), (1, 10)])
def test_masks_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    x = heads()
    with pytest.raises(NotImplementedError, match=r"^attention_mask has shape"):
        kernels.attention_forward(Layer(), x, x, x, torch.ones(shape))


def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    causal = transformers.masking_utils.causal_mask_function
    x = heads()
    mask = kernels.padding_mask(1, 9, 9, mask_function=causal)
    with pytest.raises(NotImplementedError, match=r"^sliding_window is 4"):
        kernels.attention_forward(Layer(), x, x, x, mask, sliding_window=4)
