"""Fields and inputs that the rules of this folder cannot derive, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16}
HYBRID = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}
WINDOWED_VISION = {"window_size": 16, "patch_size": 4, "fullatt_block_indexes": [1]}
STAGES_AS_ROWS = {
    "backbone_config": {
        "num_hidden_layers": 4,
        "out_indices": [1, 2, 3, 4],
        "reshape_hidden_states": False,
    }
}
SERIES = {"prediction_length": 8, "context_length": 16}


def rope(*sections: int, kind: str = "default") -> dict[str, Any]:
    sizes = {"rope_type": kind, "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"rope_parameters": sizes}


EXCEPTIONS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "autoformer": SERIES,
    "bamba": {**MAMBA_HEADS, "attn_layer_indices": [1]},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "blt_patcher": {"encoder_hash_byte_group_vocab": 64},
    "clvp_encoder": {"num_attention_heads": 2},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": rope(2, 3, 3)["rope_parameters"]}
    },
    "cosmos3_edge_text": rope(3, 3, 2),
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "depth_anything": STAGES_AS_ROWS,
    "dots3_note_text": {"num_key_value_heads": 4},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "ernie4_5_vl_moe_text": rope(3, 3, 2),
    "esmc": {"num_key_value_heads": 4},
    "esmfold2": {"head_dim": 32},
    "exaone4_5_vision": WINDOWED_VISION,
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_ssm": 128},
    "fuyu": {"patch_size": 8, "image_size": 32},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "vocab_size_per_layer_input": 160,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 96,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "glm4v_moe_text": rope(1, 1, 2),
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 4, "index_kpool": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "granitemoehybrid": {**MAMBA_HEADS, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "idefics": {"additional_vocab_size": 0, "cross_layer_interval": 1},
    "informer": SERIES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48, "intermediate_size": 96},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    "llava_next": {"image_grid_pinpoints": [[32, 64]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 64]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 64]]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "mask2former": {"encoder_layers": 2},
    "mgp-str": {"num_bpe_labels": 60, "num_wordpiece_labels": 60},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0, 1],
        "num_global_layers": 1,
        "vision_output_dim": 192,
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1]],
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "moshi_depth": {"num_codebooks": 20},
    "musicgen_decoder": {"num_codebooks": 3},
    "musicgen_melody_decoder": {"num_codebooks": 3},
    "owlv2_text_model": {"max_position_embeddings": 32},
    "owlvit_text_model": {"max_position_embeddings": 32},
    "pp_lcnet_v4": {"stem_channels": [3, 48, 96]},
    "prompt_depth_anything": STAGES_AS_ROWS,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 103},
    "qwen2_5_omni_vision_encoder": WINDOWED_VISION,
    "qwen2_5_vl_vision": WINDOWED_VISION,
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 96},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 103},
    "qwen3_asr_encoder": {"n_window": 32, "n_window_infer": 64},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True},
    "seamless_m4t": {"t2u_pad_token_id": 1},
    "seamless_m4t_v2": {"t2u_pad_token_id": 1},
    "shieldgemma2": {
        "mm_tokens_per_image": 4,
        "yes_token_index": 21,
        "no_token_index": 22,
    },
    "speech_to_text": {"input_feat_per_channel": 16},
    "swin2sr": {"embed_dim": 48},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "time_series_transformer": SERIES,
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "wav2vec2-bert": {"vocab_size": 64},
    "wav2vec2-conformer": {"vocab_size": 64},
    "xlstm": {"qk_dim_factor": 1.0, "mode": "inference"},
    "xmod": {"default_language": "en_XX"},
    "zamba": HYBRID,
    "zamba2": HYBRID,
    "zoedepth": STAGES_AS_ROWS,
}
"""Configuration fields; those of a sub-configuration are a dictionary."""


def questions(inputs: dict, config: Any) -> dict:
    ids = inputs["input_ids"].clone()
    shown = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    for row, tokens in zip(ids, shown):
        row[tokens.nonzero()[[0, 3, -1]]] = config.question_token_id
    return {**inputs, "input_ids": ids}


def tiles(inputs: dict, config: Any) -> dict:
    pixels = inputs["pixel_values"]
    batch, found = pixels.shape[0], dict(inputs)
    found["pixel_values"] = pixels[:, None, None].expand(-1, 1, 2, -1, -1, -1)
    found["aspect_ratio_ids"] = torch.ones(batch, 1, dtype=torch.long)
    found["aspect_ratio_mask"] = torch.tensor([1, 0]).expand(batch, 1, 2)
    if "input_ids" in inputs:
        length = inputs["input_ids"].shape[1]
        found["cross_attention_mask"] = torch.tensor([1, 0]).expand(batch, length, 1, 2)
    return found


def seen_images(inputs: dict, config: Any) -> dict:
    mask = torch.ones(*inputs["input_ids"].shape, 1, dtype=torch.long)
    pixels = inputs["pixel_values"]
    return {**inputs, "pixel_values": pixels[:, None], "image_attention_mask": mask}


def regions(inputs: dict, config: Any) -> dict:
    batch = inputs["input_ids"].shape[0]
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(batch, 7, config.visual_feat_dim, generator=generator)
    positions = torch.rand(batch, 7, config.visual_pos_dim, generator=generator)
    return {**inputs, "visual_feats": features, "visual_pos": positions}


def channels(inputs: dict, config: Any) -> dict:
    ids = inputs["decoder_input_ids"]
    count = config.decoder_config.num_channels
    return {**inputs, "decoder_input_ids": ids[..., None].expand(-1, -1, count).contiguous()}


def codebooks(inputs: dict, config: Any) -> dict:
    """Repeat the ids for each codebook; the batch stays that of the encoder."""
    count = config.num_codebooks
    return {"input_ids": inputs["input_ids"].repeat_interleave(count, 0)}


def masked_patches(inputs: dict, config: Any) -> dict:
    count = (config.image_size // config.patch_size) ** 2
    count *= config.num_frames // config.tubelet_size
    mask = torch.arange(count).expand(inputs["pixel_values"].shape[0], -1) % 2 == 0
    return {**inputs, "bool_masked_pos": mask}


def flattened(inputs: dict, config: Any) -> dict:
    """Make images as flat patches, each with its row and column in front."""
    vision = getattr(config, "vision_config", config)
    side = torch.arange(16)
    places = torch.stack([1 + side // 4, 1 + side % 4], 1).float().expand(3, -1, -1)
    shape = (3, 16, vision.patch_embed_hidden_size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    given = {name: it for name, it in inputs.items() if name.startswith("decoder_input")}
    return {**given, "flattened_patches": torch.cat([places, pixels], -1)}


def types_of_cells(inputs: dict, config: Any) -> dict:
    shape = inputs["input_ids"].shape
    return {**inputs, "token_type_ids": torch.zeros(*shape, 7, dtype=torch.long)}


TWEAKS: dict[str, Callable[[dict, Any], dict]] = {
    "dia": channels,
    "idefics": seen_images,
    "lxmert": regions,
    "mllama": tiles,
    "mllama_vision_model": tiles,
    "musicgen_decoder": codebooks,
    "musicgen_melody_decoder": codebooks,
    "pix2struct": flattened,
    "pix2struct_vision_model": flattened,
    "splinter": questions,
    "tapas": types_of_cells,
    "videomae": masked_patches,
}
"""Inputs that a model needs besides the usual ones, or in another form."""

WITHOUT: dict[str, tuple[str, ...]] = {
    "embedding_gemma2": ("pixel_values", "pixel_values_videos", "input_features"),
    "fuyu": ("pixel_values",),
    # The method divides by the patch size, which only some vision models have.
    "llava": ("image_sizes",),
    "muse_glimmer": ("pixel_values",),
    "pop2piano": ("input_features",),
    "speech-encoder-decoder": ("input_features",),
    "gemma4": ("pixel_values", "pixel_values_videos", "input_features"),
    "gemma4_unified": ("pixel_values", "pixel_values_videos", "input_features"),
    "qwen2_5_omni_thinker": ("pixel_values_videos", "input_features"),
    "qwen3_omni_moe_thinker": ("pixel_values_videos", "input_features"),
}
"""Arguments to leave out."""

ONLY_IN_TRAINING = ("reformer",)
"""Models that only have gradients in training."""
