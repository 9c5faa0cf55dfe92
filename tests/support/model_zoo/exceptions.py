"""What the rules of this folder cannot know, by model type."""

from __future__ import annotations

from typing import Any

MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA_HEADS, "attn_layer_indices": [1]},
    "dbrx": {"ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_top_k": 2}},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**MAMBA_HEADS, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True},
    "zamba": {"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1},
}
"""Fields of a configuration; those of a sub-configuration are a dictionary."""

INPUTS: dict[str, Any] = {}
"""Functions of a model and the side of padding that give inputs: all, or those beside others."""

WITHOUT: dict[str, tuple[str, ...]] = {}
"""Arguments that are not given."""
