"""Make a configuration of transformers small, by the names and defaults of its fields.

There is no list of models: a field is known by its name (hidden sizes, heads, layers, windows,
token ids, ...), sub-configurations are made small likewise, and the constructor derives the rest.
`EXCEPTIONS` has the fields of a model type that these rules cannot derive.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from support.model_zoo.exceptions import EXCEPTIONS
from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 160
FIRST_SPECIAL = 100
"""Token ids from here on are special, such as an image's placeholder; texts have smaller ones."""
WINDOW = 6
"""Shorter than the sequences, so that windows and chunks matter."""
WINDOWS_SIDE = 4
"""Side of a window of an image, in patches."""
HIDDEN, INNER, HEADS, KEY_HEADS, HEAD = 64, 96, 4, 2, 16
IMAGE, PATCH = 32, 8
WIDE = 64
"""Channel sizes from here on are reduced."""
DIVISOR = 4
"""Divides channels listed by stage, whose ratios must stay."""
MOST_LAYERS = 4

# The first pattern that matches a field's whole name gives its value; None keeps the default. Only
# integers are replaced, and None where the name can mean nothing else.
RULES: tuple[tuple[str, int | None], ...] = (
    (r"pad_token_id|pad_index", 0),
    (r"bos_token_id|bos_index|decoder_start_token_id", 1),
    (r"(forced_)?eos_token_id|eos_index", 2),
    (r"(max|num|min)_.*tokens?.*|type_vocab_size|task_type_vocab_size", None),
    (r"(.*_)?vocab_size(_.*)?|(.*_)?vocabulary_size|num_tokens", VOCABULARY),
    (r"index_topk", 4),
    (r"num_experts_per_tok.*|(.*_)?top_?k(_experts)?|.*moe_topk|moe_k|router_top_k", 2),
    (r"n_group|topk_group|num_expert_group.*|moe_.*_group", 1),
    (r"(.*_)?n?(num)?_?(routed|local)_experts|num_experts|moe_num_experts|num_local_experts", 4),
    (r"(.*_)?first_k_dense_replace|max_window_layers|num_dense_layers", 1),
    (r"(.*_)?(n|num)_?(shared_experts|(moe_)?shared_expert)|moe_num_shared_experts", 1),
    (r"(.*_)?(num|n)_(key_value|kv)_heads|num_kv_heads|num_key_value_groups", KEY_HEADS),
    (r"(.*_)?linear_num_key_heads|linear_num_value_heads", 4),
    (r"(.*_)?(num_attention_heads|num_heads|n_heads?|attention_heads|attn_heads)", HEADS),
    (r"qk_rope_head_dim|rotary_dim|rope_head_dim", 8),
    (r"(.*_)?(head_dim|d_kv|d_head|head_size|key_head_dim|value_head_dim|kv_channels)", HEAD),
    (r"(q|kv|o)_lora_rank|.*_rank", 32),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|layers|depth|num_decoder_layers)", 2),
    (r"num_encoder_layers|.*_depth|[lrx]_layers|num_adapter_layers|num_hidden_groups", 2),
    (r"(sliding_|attention_|local_attention_)?window(_size|_len)?|sliding_window_size", WINDOW),
    (r"local_attention|attention_chunk_size|keep_window_size", WINDOW),
    (r"(.*_)?chunk_size|chunk_length|block_size|.*_chunk_size_.*", 4),
    (r"context_length", 64),
    (r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_relative_positions)", 64),
    (r"max_(source|target)_positions", 64),
    (r"(.*_)?(image_size|img_size|input_size)", IMAGE),
    (r"patch_size", PATCH),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|d_inner|dff|mlp_dim|ffn_hidden_size)", INNER),
    (r"(.*_)?(dim_ff|feedforward_dim|dim_feedforward|intermediate_dim|ffn_dim)(_.*)?", INNER),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|dim)", HIDDEN),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups|num_groups|.*_groups|n_groups", 4),
    (r"(.*_)?codebook_size|num_embeddings|num_buckets", 32),
    (r"num_mel_bins|n_mels|num_mels", 16),
    (r"num_queries|num_query_tokens|two_stage_num_proposals|.*num_latents|n_latents", 8),
    (r"audio_channels|num_channels|.*kernel.*|.*stride.*|.*(ratio|factor|rate)s?", None),
    (r"(.*_)?(dims?|size|channels|width|units|filters|bins?)(_.*)?", WIDE),
)  # fmt: skip
WIDTHS = re.compile(r".*(dim|size|channel|width|filter|planes|feature|dims)(s|_.*)?")
NOT_WIDTHS = re.compile(r".*(kernel|patch|stride|window|image|spatial|grid|head_in|ratio).*")
RANDOM = re.compile(
    r".*(dropout|drop_rate|drop_path|layerdrop|_pdrop|jitter|drop_prob|dropout_prob).*"
    r"|mask_(time|feature)_prob|.*noise.*"
)
SWITCHES = {"use_sliding_window": True, "apply_spec_augment": False}
TOKENS = re.compile(r"(.*_)?(token|start|end|newline|patch)_(id|index|idx)|.*(bos|eos|unk|mask)_id")
# Fields that default to None, which would leave out a part of the model.
NEEDED = (
    *("sliding_window", "head_dim", "num_key_value_heads", "vocab_size"),
    *("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
)
LARGE = 1 << 20
KEPT = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig))


def small_config(model_type: str, **changes: object) -> PreTrainedConfig:
    """Return a small configuration of a model type."""
    return small_config_of(CONFIG_MAPPING[model_type], **changes)


def small_config_of(kind: type[PreTrainedConfig], **changes: object) -> PreTrainedConfig:
    """Return a small configuration of a class; ``changes`` to fields take precedence over rules.

    Changes of a sub-configuration are a dictionary.
    """
    changes = merged(EXCEPTIONS.get(kind.model_type, {}), changes)
    sizes = {**small_fields(kind), **small_parts(kind, changes)}
    given = {name: value for name, value in changes.items() if name not in kind.sub_configs}
    return kind(**{**layers_of_each_kind(kind, {**sizes, **given}), **given})


def merged(first: dict, second: dict) -> dict:
    both = {**first, **second}
    for name in first.keys() & second.keys():
        if isinstance(first[name], dict) and isinstance(second[name], dict):
            both[name] = merged(first[name], second[name])
    return both


def small_parts(kind: type[PreTrainedConfig], changes: dict) -> dict[str, object]:
    """Return small sub-configurations where the constructor would make large ones."""
    parts: dict[str, object] = {}
    for name, spec in kind.sub_configs_defaults.items():
        given = changes.get(name, {})
        if isinstance(given, PreTrainedConfig) or given is None:
            parts[name] = given
        elif not spec.optional or name in changes:
            given = {**stages_of(spec.init_kwargs), **given}
            model_type = given.pop("model_type", spec.model_type)
            known = isinstance(spec.config_class, type) and issubclass(
                spec.config_class, PreTrainedConfig
            )
            part = spec.config_class if known else CONFIG_MAPPING[model_type]
            parts[name] = small_config_of(part, **given)
    return parts


def stages_of(options: dict) -> dict[str, object]:
    """Return a backbone's output stages, from the options that it is made with."""
    stages = ("stage1", "stage2", "stage3", "stage4")
    names, indices = options.get("out_features", ()), options.get("out_indices", ())
    if names and all(it in stages for it in names):
        return {"out_features": list(names)}
    return {"out_indices": list(indices)} if indices and max(indices) <= len(stages) else {}


def small_fields(kind: type[PreTrainedConfig]) -> dict[str, object]:
    """Return small values for the fields that need them."""
    found: dict[str, object] = {}
    staged = any(
        isinstance(it.default, (tuple, list)) and re.fullmatch(r"depths|.*heads", it.name)
        for it in dataclasses.fields(kind)
    )
    for field in dataclasses.fields(kind):
        if field.name in KEPT:
            continue
        default = field.default
        if default is dataclasses.MISSING:
            made = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if made else None
        value = small_value(kind, field.name, default, str(field.type), staged)
        if value != default:
            found[field.name] = value
    if staged and {"window_size", "image_size"} <= kind_fields(kind):
        # After three halvings the image still holds a whole window.
        found |= {"image_size": 8 * 4 * WINDOWS_SIDE, "window_size": WINDOWS_SIDE, "patch_size": 4}
    if "mrope_section" in source_of(kind) and takes_rope_sections(kind):
        found["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        }
    return found


def takes_rope_sections(kind: type[PreTrainedConfig]) -> bool:
    field = {it.name: it for it in dataclasses.fields(kind)}.get("rope_parameters")
    takes_text = "Vision" not in kind.__name__
    return takes_text and field is not None and "RopeParameters" in str(field.type)


def kind_fields(kind: type[PreTrainedConfig]) -> set[str]:
    return {it.name for it in dataclasses.fields(kind)}


def source_of(kind: type[PreTrainedConfig]) -> str:
    """Return the source of the models that take this configuration."""
    folder = Path(sys.modules[kind.__module__].__file__ or "").parent
    return "".join(it.read_text() for it in sorted(folder.glob("modeling_*.py")))


def small_value(
    kind: type[PreTrainedConfig], name: str, default: object, annotation: str, staged: bool
) -> object:
    if isinstance(default, (bool, str)):
        return SWITCHES.get(name, default)
    if default is not None and RANDOM.fullmatch(name):
        listed = isinstance(default, (tuple, list))
        return type(default)(0.0 for _ in default) if listed else type(default)(0)
    if name in ("initializer_range", "init_std", "initializer_std"):
        return 0.12 if isinstance(default, float) and default > 1e-3 else default
    if isinstance(default, float):
        return default
    if isinstance(default, (tuple, list)):
        return small_sequence(name, default)
    if staged and isinstance(default, int) and name in ("embed_dim", "hidden_size"):
        return default // DIVISOR
    if isinstance(default, int):
        return small_integer(kind, name, default)
    if default is None and "int" in annotation and name in NEEDED:
        return small_integer(kind, name, LARGE)
    if default is None and "int" in annotation and TOKENS.fullmatch(name):
        return small_integer(kind, name, FIRST_SPECIAL)
    return default


def small_integer(kind: type[PreTrainedConfig], name: str, default: int) -> int:
    if name == "num_key_value_heads" and "kv_lora_rank" in kind_fields(kind):
        # Compressed keys have no shared heads.
        return HEADS
    for pattern, value in RULES:
        if re.fullmatch(pattern, name):
            return default if value is None else min(value, default) if default > 0 else default
    if TOKENS.fullmatch(name) and default >= 0:
        return special_token(name)
    return default


SPECIAL: dict[str, int] = {}


def special_token(name: str) -> int:
    """Return the id of a special token: the same in all configurations, another for each name."""
    name = re.sub(r"_(token_)?(id|index|idx)$", "", name)
    known = ("image", "video", "audio", "image_start", "image_end", "vision_start", "vision_end")
    if name in known:
        return FIRST_SPECIAL + known.index(name)
    return SPECIAL.setdefault(name, FIRST_SPECIAL + len(known) + len(SPECIAL) % 40)


def small_sequence(name: str, default: tuple | list) -> object:
    """Shrink lists by stage or layer: depths, and channels with the ratios that they have."""
    if not all(isinstance(it, int) and not isinstance(it, bool) for it in default):
        return default
    if re.fullmatch(r"(.*_)?image_size", name):
        return type(default)((IMAGE, IMAGE + 2 * PATCH)[: len(default)])
    if re.fullmatch(r"depths|.*_depths|layers|num_blocks|.*num_blocks|.*_repeats", name):
        return type(default)(min(it, 2) for it in default)
    if WIDTHS.fullmatch(name) and not NOT_WIDTHS.fullmatch(name):
        return type(default)(it // DIVISOR if it >= 2 * DIVISOR else it for it in default)
    return default


def layers_of_each_kind(kind: type[PreTrainedConfig], fields: dict) -> dict:
    """Give a small model one layer of each kind that the large one has.

    Lists with an entry for each layer of the default configuration (``layer_types`` and the like)
    are cut to the first layer of each kind.
    """
    names = [it for it in ("num_hidden_layers", "n_layer", "num_layers") if it in kind_fields(kind)]
    if not names or names[0] not in fields:
        return fields
    try:
        large = kind()
    except Exception:
        return fields
    count = getattr(large, names[0])
    lists = {
        name: value
        for name, value in vars(large).items()
        if name in kind_fields(kind)
        and isinstance(value, (list, tuple))
        and len(value) == count
        and count > 2
    }
    if not lists:
        return fields
    kinds: dict[tuple, int] = {}
    for index, each in enumerate(zip(*lists.values())):
        kinds.setdefault(tuple(map(str, each)), index)
    chosen = sorted(list(kinds.values())[:MOST_LAYERS])
    while len(chosen) < 2:
        chosen.append(chosen[-1] + 1)
    cut = {name: [value[index] for index in chosen] for name, value in lists.items()}
    return {**fields, names[0]: len(chosen), **cut}
