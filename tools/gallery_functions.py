"""The masks and score functions of docs/mods-gallery.md, each as a user writes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SEQ, HEADS = 3072, 16
BLOCK, WINDOW, WIDTH = 96, 512, 64
DOCUMENT = torch.repeat_interleave(torch.arange(5), torch.tensor([300, 900, 172, 1200, 500]))
TABLE = torch.linspace(-1, 1, HEADS * 32).view(HEADS, 32)  # of 32 buckets
BIAS = torch.zeros(HEADS, SEQ, SEQ, dtype=torch.bfloat16)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)


def prefix(b, h, q_idx, kv_idx):
    return (kv_idx < 700) | (q_idx >= kv_idx)


def document(b, h, q_idx, kv_idx):
    return (DOCUMENT[q_idx] == DOCUMENT[kv_idx]) & (q_idx >= kv_idx)


def dilated(b, h, q_idx, kv_idx):
    distance = torch.abs(q_idx - kv_idx)
    return (distance <= WINDOW) & (distance % 4 == 0)


def neighbourhood(b, h, q_idx, kv_idx):
    """Of an image of 48 rows of 64 pixels: those at most 6 rows and columns away."""
    rows = torch.abs(q_idx // WIDTH - kv_idx // WIDTH) <= 6
    return rows & (torch.abs(q_idx % WIDTH - kv_idx % WIDTH) <= 6)


def block_diffusion(b, h, q_idx, kv_idx):
    """Noisy tokens, then clean ones."""
    half = SEQ // 2
    clean_q, clean_k = q_idx >= half, kv_idx >= half
    block_q, block_k = q_idx % half // BLOCK, kv_idx % half // BLOCK
    own = (block_q == block_k) & (clean_q == clean_k)
    before = (block_q > block_k) & clean_k & ~clean_q
    return own | before | ((block_q >= block_k) & clean_q & clean_k)


def alibi(score, b, h, q_idx, kv_idx):
    return score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv_idx - q_idx)


def t5_buckets(score, b, h, q_idx, kv_idx):
    distance = torch.abs(q_idx - kv_idx)
    far = 16 + (torch.log(torch.clamp(distance, min=1) / 16) / math.log(8) * 16).long()
    bucket = torch.where(distance < 16, distance, torch.clamp(far, max=31))
    return score + TABLE[h, bucket]


def soft_cap(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


def tanh(score, b, h, q_idx, kv_idx):
    return torch.tanh(score)


def dense_bias(score, b, h, q_idx, kv_idx):
    return score + BIAS[h, q_idx, kv_idx]


class Entry(NamedTuple):
    """A function of the gallery.

    Attributes:
        title: of its section.
        function: the mask, or the score function.
        feature: its name in the result file of ``benchmarks/mods.py``; empty: it is not measured there.
    """

    title: str
    function: Callable[..., Any]
    feature: str = ""


MASKS = (
    Entry("Causal", causal, "causal"),
    Entry("Window", window, "window"),
    Entry("Prefix-LM", prefix, "prefix"),
    Entry("Documents", document, "document"),
    Entry("Dilated window", dilated, "dilated"),
    Entry("Neighbourhood", neighbourhood, "neighbourhood"),
    Entry("Block diffusion", block_diffusion, "block_diffusion"),
)
SCORES = (
    Entry("ALiBi", alibi, "alibi"),
    Entry("T5 buckets", t5_buckets, "buckets"),
    Entry("Soft cap", soft_cap, "softcap"),
    Entry("tanh", tanh, "tanh"),
    Entry("Dense bias", dense_bias, "bias"),
)
