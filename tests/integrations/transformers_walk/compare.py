"""One architecture: eager attention in float32 and in bfloat16 against this library's in bfloat16."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

import flash_attention
from flash_attention.compat import transformers as kernels
from transformers_walk.small import VARIANTS, NotSmallError, build, inputs_of, model_class_of

SCALE = 4  # of the weights, so that scores are far from uniform
OURS = Path(flash_attention.__file__).parent
PADDINGS = (None, "left", "right")

EQUAL, REFUSED, NOT_SMALL, NOT_OURS, DIFFERENT, BROKEN = (
    "equal", "refused by name", "cannot be built small", "runs no attention of ours", "different", "broken",
)  # fmt: skip
BLIND = "equal, but the attention does not show in the result"


@dataclass(frozen=True)
class Finding:
    model_type: str
    padding: str | None
    kind: str
    why: str = ""


def walk(model_type: str, device: str, paddings: tuple[str | None, ...] = PADDINGS) -> Iterator[Finding]:
    """What comes of ``model_type``, for each padding; one finding where all are alike."""
    failed: str | None = None
    for variant in VARIANTS:
        try:
            expected = _expected(model_type, variant, device, paddings)
            break
        except NotSmallError as error:
            failed = failed or str(error)
        except Exception as error:  # eager attention fails as well
            failed = failed or f"eager: {type(error).__name__}: {' '.join(str(error).split())}"
    else:
        yield Finding(model_type, None, NOT_SMALL, failed or "")
        return
    theirs, given, results = expected
    try:
        ours = _with_our_attention(model_type, variant, theirs)
        ours.to(device)
    except Exception as error:
        yield Finding(model_type, None, *_refusal(error))
        return
    rounding = max((theirs - exact).abs().max().item() for exact, theirs in results.values())
    for padding, inputs in given.items():
        try:
            with _counted() as calls:
                got = _result(ours, inputs, device)
            with _counted(is_spoilt=True):
                spoilt = _result(ours, inputs, device)
        except Exception as error:
            yield Finding(model_type, padding, *_refusal(error))
            continue
        kind, why = _compared(got, spoilt, *results[padding], rounding)
        yield Finding(model_type, padding, NOT_OURS if kind in (EQUAL, BLIND) and not calls else kind, why)


Inputs = dict[str | None, dict[str, Any]]


def _expected(
    model_type: str, variant: dict[str, Any], device: str, paddings: tuple[str | None, ...]
) -> tuple[PreTrainedModel, Inputs, dict[str | None, list[Tensor]]]:
    """The eager model in bfloat16, inputs, and the results in float32 and in bfloat16, by padding."""
    exact = build(model_type, "eager", variant)
    given: Inputs = {padding: inputs_of(exact, padding) for padding in paddings}
    if "input_ids" not in given[None]:
        given = {None: given[None]}
    _spread(exact)
    exact.to(device)
    theirs = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict({name: x.float() for name, x in theirs.state_dict().items()})
    results = {
        padding: [_result(model, inputs, device) for model in (exact, theirs)]
        for padding, inputs in given.items()
    }
    return theirs, given, results


def _spread(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.ndim > 1:
                parameter.mul_(SCALE)
            if "sink" in name:
                parameter.normal_(0, 2)


def _with_our_attention(model_type: str, variant: dict[str, Any], like: PreTrainedModel) -> PreTrainedModel:
    kernels.register(model_class_of(model_type))
    try:
        ours = build(model_type, kernels.NAME, variant)
    except NotSmallError as error:
        raise error.__cause__ or error from None
    ours.bfloat16().load_state_dict(like.state_dict())
    return ours


@contextmanager
def _counted(is_spoilt: bool = False) -> Iterator[list[str]]:
    """Counts the calls of our attention. Spoilt ones forget their scores: a result that stays the same shows
    nothing of the attention."""
    calls: list[str] = []

    def attention(module: Any, query: Tensor, *args: Any, **options: Any) -> Any:
        calls.append(type(module).__name__)
        return kernels.attention_forward(module, query * 0 if is_spoilt else query, *args, **options)

    AttentionInterface.register(kernels.NAME, attention)
    try:
        yield calls
    finally:
        AttentionInterface.register(kernels.NAME, kernels.attention_forward)


@torch.no_grad()
def _result(model: PreTrainedModel, inputs: dict[str, Any], device: str) -> Tensor:
    dtype = next(model.parameters()).dtype
    moved = {name: x.to(device) for name, x in inputs.items()}
    moved = {name: x.to(dtype) if x.is_floating_point() else x for name, x in moved.items()}
    torch.manual_seed(0)
    output = model(**moved)
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        found = getattr(output, name, None)
        if found is not None:
            break
    else:
        found = next(x for x in output.to_tuple() if isinstance(x, Tensor) and x.is_floating_point())
    mask = moved.get("attention_mask")
    if mask is not None and found.shape[:2] == mask.shape:
        found = found[mask.bool()]
    return found.float().cpu()


def _compared(got: Tensor, spoilt: Tensor, exact: Tensor, theirs: Tensor, rounding: float) -> tuple[str, str]:
    """
    Args:
        rounding: the largest error of eager attention over all paddings; a result of few numbers may be exact
            by chance in one of them.
    """
    if not exact.isfinite().all() or not theirs.isfinite().all():
        return NOT_SMALL, "eager: the result is not finite"
    limit = 2 * rounding + 1e-2 * exact.std().item() + 1e-6
    error = (got - exact).abs().max().item()
    said = f"off by {error:.2g}, eager by {(theirs - exact).abs().max().item():.2g}"
    if not error <= limit:
        return DIFFERENT, said
    if (spoilt - exact).abs().max().item() <= limit:
        return BLIND, said
    return EQUAL, said


def _refusal(error: Exception) -> tuple[str, str]:
    """Errors of ours, and of Transformers about flash attention, name what they refuse; others are faults."""
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and OURS in Path(frames[-1].filename).parents
    is_named = isinstance(error, (NotImplementedError, ValueError, TypeError))
    text = " ".join(str(error).split())
    if is_named and (is_ours or "flash" in text.lower()):
        return REFUSED, text
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return BROKEN, f"{type(error).__name__}: {text[:300]} ({where})"
