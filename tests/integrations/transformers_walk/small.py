"""Small models of any architecture: configurations whose sizes are shrunk by the names of their fields."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

HIDDEN, HEADS, HEADS_KV, HEAD, LAYERS, VOCABULARY, TOKENS, WINDOW, IMAGE, PATCH = (
    64,
    4,
    2,
    16,
    2,
    160,
    20,
    8,
    32,
    8,
)
MOST_PARAMETERS = 30e6

# Auto classes; the first that has a model type is taken: those with the most attention come first.
TASKS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
)

_SIZES: tuple[tuple[str, Any], ...] = (  # the first pattern that matches the whole name
    (r"(num_|n_)?(hidden_|encoder_|decoder_|transformer_|attention_)?(layers?|blocks|depth)", LAYERS),
    (r"(num_)?(hidden_layers|layers|n_layers|decoder_layers|encoder_layers).*", LAYERS),
    (r"(encoder|decoder|text|vision|audio)_(n_|num_)?(hidden_)?layers?", LAYERS),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|kv_heads|multi_query_group_num).*", HEADS_KV),
    (r"((num_)?(encoder_|decoder_)?(attention_)?(n_)?heads?|n_heads?|num_heads)", HEADS),
    (r"(encoder|decoder)_attention_heads", HEADS),
    (r"(num_)?(linear|mamba|index)_?.*heads", HEADS),
    (
        r"(qk_nope_head_dim|qk_rope_head_dim|v_head_dim|head_dim|d_kv|kv_channels|attention_head_dim)"
        r"|(global_head_dim|swa_head_dim)",
        HEAD,
    ),
    (r"(qk_head_dim)", 2 * HEAD),
    (r"(kv_lora_rank|q_lora_rank|o_lora_rank)", 32),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|inner_dim|mlp_dim|ffn_hidden).*", 96),
    (
        r"(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|dim|d_embed|encoder_hidden_size)"
        r"|(emb_dim|word_embed_proj_dim|projection_dim|text_embed_dim|projector_hidden_size|out_hidden_size)"
        r"|(output_hidden_size|proj_dim)",
        HIDDEN,
    ),
    # Every token takes every expert: rounding that changes who is chosen would hide what attention does.
    (r"(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_routed_experts)", 2),
    (r"(num_experts_per_tok|moe_topk|moe_top_k|top_k_experts|num_selected_experts|moe_k|expert_top_k)", 2),
    (
        r"(first_k_dense_replace|n_shared_experts|num_shared_experts|moe_num_shared_experts)"
        r"|(n_group|topk_group)",
        1,
    ),
    (r".*_interval|attn_layer_period|attention_layer_period", 2),
    (r"attn_layer_offset", 1),
    (r"(codebook_dim|audio_hidden_size|adaptor_hidden_size|text_hidden_size|vision_hidden_size)", HIDDEN),
    (
        r"(max_position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx)"
        r"|(max_sequence_length|seq_length|max_seq_len)",
        128,
    ),
    (r"(sliding_window|attention_window|local_attention|sliding_window_size|window_size)", WINDOW),
    (r"(vocab_size|text_vocab_size|src_vocab_size|tgt_vocab_size|vocab_size_per_layer_input)", VOCABULARY),
    (r"(image_size|input_size|img_size)", IMAGE),
    (r"(patch_size)", PATCH),
    (r"(num_codebooks)", 2),
    (r"(num_meta_tokens|mtp_num_layers|num_nextn_predict_layers)", 0),
    (r"hidden_size_per_layer_input", 16),
)
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


class NotSmallError(Exception):
    """The architecture can't be built small in this way; the message says why."""


def model_types() -> list[str]:
    return sorted(configuration_auto.CONFIG_MAPPING_NAMES)


def model_class_of(model_type: str) -> type[PreTrainedModel]:
    for task in TASKS:
        name = getattr(modeling_auto, task, {}).get(model_type)
        if name is not None:
            name = name if isinstance(name, str) else name[0]
            found = getattr(transformers, name, None)
            if found is not None and hasattr(found, "config_class"):
                return found
    raise NotSmallError("none of the auto classes that are walked has a model of this type")


VARIANTS: tuple[dict[str, Any], ...] = (  # tried in turn until eager attention runs
    {},
    {"num_key_value_heads": HEADS},
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 4, "num_key_value_heads": HEADS},
    {"hidden_size": 512, "n_embd": 512, "head_dim": 128},  # of rotations with fixed sections
    {"attn_layer_indices": [1], "layer_types": ["mamba", "attention"]},
)


def small_config(
    config_class: type[PretrainedConfig], variant: dict[str, Any] | None = None, depth: int = 0
) -> PretrainedConfig:
    """The default configuration with small sizes, made anew so that what follows from sizes follows.

    Args:
        variant: sizes that go before those by name.
    """
    default = config_class()
    changes: dict[str, Any] = {}
    variant = variant or {}
    names = set(inspect.signature(config_class.__init__).parameters) | set(default.to_dict())
    for name in sorted(names - {"self", "kwargs"}):
        try:
            value = getattr(default, name, None)
        except Exception:  # sizes that differ between layers have no common value
            continue
        if name in (getattr(default, "sub_configs", None) or {}) and depth < 3:
            sub_class = type(value) if isinstance(value, PretrainedConfig) else default.sub_configs[name]
            if sub_class is not None and hasattr(sub_class, "model_type") and sub_class.model_type:
                changes[name] = small_config(sub_class, variant, depth + 1)
            continue
        if name in variant and value is not None:
            changes[name] = variant[name]
        elif name in _TOKEN_IDS and isinstance(value, int):
            changes[name] = _TOKEN_IDS[name]
        elif re.fullmatch(r".*_token_id|.*_token_index|.*_token_idx", name) and isinstance(value, int):
            changes[name] = min(value, VOCABULARY - 1) if value >= 0 else value
        elif isinstance(value, int) and not isinstance(value, bool):
            for pattern, size in _SIZES:
                if re.fullmatch(pattern, name):
                    changes[name] = size if "window" in name or value else value
                    break
        elif name == "use_sliding_window":
            changes[name] = True
        elif name in ("layer_types", "mlp_layer_types") and value:
            changes[name] = None
        elif isinstance(value, dict) and "mrope_section" in value:
            changes[name] = {**value, "mrope_section": [2, 3, 3]}  # their sum is HEAD / 2
    return _made(config_class, changes)


def _made(config_class: type[PretrainedConfig], changes: dict[str, Any]) -> PretrainedConfig:
    """Leaves out changes that the class refuses by their names, one after the other."""
    changes = dict(changes)
    for _ in range(6):
        try:
            return config_class(**changes)
        except Exception as error:
            named = [name for name in changes if re.search(rf"\b{name}\b", str(error))]
            layer_types = getattr(config_class(), "layer_types", None)
            if "layer_types" in changes and changes["layer_types"] is None and layer_types:
                kinds = list(dict.fromkeys(layer_types))
                n_layers = changes.get("num_hidden_layers", LAYERS)
                changes["layer_types"] = (kinds * n_layers)[:n_layers]
            elif named:
                del changes[named[0]]
            else:
                raise
    return config_class(**changes)


def build(model_type: str, attention: str, variant: dict[str, Any] | None = None) -> PreTrainedModel:
    """A model of random weights in float32.

    Raises:
        NotSmallError: it has too many parameters, or cannot be built at all.
    """
    model_class = model_class_of(model_type)
    try:
        config = small_config(model_class.config_class, variant)
        config._attn_implementation = attention
        with torch.device("meta"):
            n_parameters = sum(p.numel() for p in model_class(config).parameters())
    except NotSmallError:
        raise
    except Exception as error:
        raise NotSmallError(f"{type(error).__name__}: {error}") from error
    if n_parameters > MOST_PARAMETERS:
        raise NotSmallError(f"{n_parameters / 1e6:.0f} million parameters after shrinking")
    torch.manual_seed(0)
    try:
        with torch.device("cpu"):
            return model_class(config).eval()
    except Exception as error:
        raise NotSmallError(f"{type(error).__name__}: {error}") from error


def inputs_of(model: PreTrainedModel, padding: str | None) -> dict[str, Any]:
    """What the model's forward takes, for two items."""
    generator = torch.Generator("cpu").manual_seed(1)
    parameters = inspect.signature(model.forward).parameters
    main = model.main_input_name
    tokens = torch.randint(3, 100, (2, TOKENS), generator=generator, device="cpu")
    given: dict[str, Any] = {}
    if main == "input_ids" or "input_ids" in parameters:
        mask = torch.ones_like(tokens)
        if padding:
            rows = slice(0, 7) if padding == "left" else slice(13, TOKENS)
            mask[1, rows], tokens[1, rows] = 0, 0
            given["attention_mask"] = mask
        last = torch.where(mask.bool(), torch.arange(TOKENS, device="cpu"), -1).max(1).values
        tokens[torch.arange(2, device="cpu"), last] = _TOKEN_IDS["eos_token_id"]  # where some models pool
        given["input_ids"] = tokens
    config = model.config
    vision = getattr(config, "vision_config", None) or config
    takes_image = "pixel_values" in parameters and parameters["pixel_values"].default is not None
    is_joint = "input_ids" in parameters and "clip" in config.model_type and vision is not config
    if "grid_thw" in parameters:  # patches of two images
        given.clear()
        size = getattr(config, "patch_size", PATCH)
        depth = getattr(config, "temporal_patch_size", 2) * getattr(config, "in_channels", 3)
        name = "hidden_states" if "hidden_states" in parameters else "pixel_values"
        given[name] = torch.randn(32, depth * size * size, generator=generator, device="cpu")
        given["grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]], device="cpu")
    elif main == "pixel_values" or takes_image or is_joint:
        image = getattr(vision, "image_size", IMAGE)
        channels = getattr(vision, "num_channels", 3)
        sides = image if isinstance(image, (list, tuple)) else (image, image)
        given["pixel_values"] = torch.randn(2, channels, *sides, generator=generator, device="cpu")
    elif main == "input_features":
        n_bins = getattr(config, "num_mel_bins", 80)
        frames = 2 * getattr(config, "max_source_positions", 64)
        given["input_features"] = torch.randn(2, n_bins, frames, generator=generator, device="cpu")
    elif main == "input_values":
        given["input_values"] = torch.randn(2, 4000, generator=generator, device="cpu")
    elif main != "input_ids":
        raise NotSmallError(f"its main input is {main}")
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        n_codebooks = getattr(getattr(config, "decoder", None), "num_codebooks", 1)
        given["decoder_input_ids"] = torch.randint(
            3, 100, (2 * n_codebooks, 7), generator=generator, device="cpu"
        )
    return given
