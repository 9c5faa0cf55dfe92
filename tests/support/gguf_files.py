"""Write GGUF files, block by block as ggml-common.h of llama.cpp defines them."""

import math

import numpy as np
import torch
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MiniMaxM2Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_experts": 5}
MIXTURES = {
    "qwen2moe": (Qwen2MoeConfig, EXPERTS | {"shared_expert_intermediate_size": 512}),
    "qwen3moe": (Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": True, "head_dim": 64}),
    "minimax-m2": (
        MiniMaxM2Config,
        {"num_experts_per_tok": 2, "num_local_experts": 5, "head_dim": 64, "rotary_dim": 32},
    ),
}
ARCHITECTURES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    **MIXTURES,
}
"""Configurations, with the sizes that they have besides `SIZES`."""
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
OF_EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_in_file(name):
    """Return the GGUF name of a parameter of a Llama."""
    module, _, last = name.rpartition(".")
    if module in OTHERS:
        return f"{OTHERS[module]}.{last}"
    _, _, number, within = module.split(".", 3)
    if last == "e_score_correction_bias":
        return f"blk.{number}.exp_probs_b.bias"
    return f"blk.{number}.{LAYER[within]}.{last}"


def tensors_in_file(name, weight, named=name_in_file):
    """Yield the names of a parameter's tensors in a file, and the part of it that each has."""
    module, _, last = name.rpartition(".")
    if not module.endswith(".experts"):
        yield named(name), weight
        return
    number = module.split(".")[2]
    for own, part in zip(OF_EXPERTS[last], weight.chunk(len(OF_EXPERTS[last]), 1)):
        yield f"blk.{number}.{own}.weight", part


# ------------------------------------------------------------------------------------------- blocks

# Each function makes a random block, and returns its bytes and its weights in float64.


def half(random, largest):
    """Return a positive float16, as bytes and as number."""
    number = np.float16(largest * random.uniform(0.2, 1))
    return number.tobytes(), float(number)


def nibbles(integers):
    """Pack integers of 4 bits: those of the first half in the lower bits."""
    first, second = np.split(np.asarray(integers), 2)
    return bytes(int(a) | int(b) << 4 for a, b in zip(first, second))


def q4_0(random):
    scale, d = half(random, 0.01)
    q = random.integers(16, size=32)
    return scale + nibbles(q), [(int(it) - 8) * d for it in q]


def q4_1(random):
    (scale, d), (minimum, m) = half(random, 0.01), half(random, 0.1)
    q = random.integers(16, size=32)
    return scale + minimum + nibbles(q), [int(it) * d + m for it in q]


def q5_0(random):
    scale, d = half(random, 0.005)
    q = random.integers(32, size=32)
    upper = sum(int(it >> 4) << place for place, it in enumerate(q))
    return scale + upper.to_bytes(4, "little") + nibbles(q & 15), [(int(it) - 16) * d for it in q]


def q8_0(random):
    scale, d = half(random, 0.0006)
    q = random.integers(-128, 128, size=32)
    return scale + q.astype(np.int8).tobytes(), [int(it) * d for it in q]


def iq4_nl(random):
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    scale, d = half(random, 0.0006)
    q = random.integers(16, size=32)
    return scale + nibbles(q), [levels[it] * d for it in q]


def iq4_xs(random):
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    scale, d = half(random, 0.00002)
    scales, q = random.integers(64, size=8), random.integers(16, size=(8, 32))
    upper = sum(int(it >> 4) << 2 * group for group, it in enumerate(scales))
    lower = bytes(int(a & 15) | int(b & 15) << 4 for a, b in scales.reshape(4, 2))
    packed = b"".join(nibbles(group) for group in q)
    weights = [d * (int(it) - 32) * levels[code] for it, group in zip(scales, q) for code in group]
    return scale + upper.to_bytes(2, "little") + lower + packed, weights


def mxfp4(random):
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    exponent, q = int(random.integers(118, 122)), random.integers(16, size=32)
    weights = [(-1) ** (it >> 3) * magnitudes[it & 7] * 2.0 ** (exponent - 127) for it in q]
    return bytes([exponent]) + nibbles(q), weights


def six_bits(scales, minima):
    """Pack 8 scales and 8 minima into 12 bytes."""
    packed = bytearray(12)
    for group, (scale, minimum) in enumerate(zip(map(int, scales), map(int, minima))):
        if group < 4:
            packed[group] |= scale
            packed[group + 4] |= minimum
        else:
            packed[group + 4] = (scale & 15) | (minimum & 15) << 4
            packed[group - 4] |= scale >> 4 << 6
            packed[group] |= minimum >> 4 << 6
    return bytes(packed)


def with_minima(random, bits):
    """Return the head of a block of Q4_K or Q5_K, its integers (8, 32), and its weights."""
    (scale, d), (minimum, m) = half(random, 0.0003 * 16 / 2**bits), half(random, 0.002)
    scales, minima = random.integers(64, size=(2, 8))
    scales[random.integers(8)] = 0
    q = random.integers(2**bits, size=(8, 32))
    weights = (d * scales)[:, None] * q - (m * minima)[:, None]
    return scale + minimum + six_bits(scales, minima), q, weights.ravel().tolist()


def q4_k(random):
    head, q, weights = with_minima(random, 4)
    return head + b"".join(nibbles(pair.ravel()) for pair in q.reshape(4, 2, 32)), weights


def q5_k(random):
    head, q, weights = with_minima(random, 5)
    upper = bytes(sum(int(q[group, it] >> 4) << group for group in range(8)) for it in range(32))
    lower = b"".join(nibbles(pair.ravel()) for pair in (q & 15).reshape(4, 2, 32))
    return head + upper + lower, weights


def q6_k(random):
    scale, d = half(random, 0.00003)
    scales = random.integers(-128, 128, size=16)
    q = random.integers(64, size=256)
    lower, upper = bytearray(128), bytearray(64)
    for index, it in enumerate(map(int, q)):
        part, place = divmod(index, 128)
        quarter, at = divmod(place, 32)
        lower[64 * part + place % 64] |= (it & 15) << 4 * (quarter // 2)
        upper[32 * part + at] |= it >> 4 << 2 * quarter
    weights = [d * int(scales[index // 16]) * (int(it) - 32) for index, it in enumerate(q)]
    return bytes(lower) + bytes(upper) + scales.astype(np.int8).tobytes() + scale, weights


BLOCKS = {
    "Q4_0": (q4_0, 32),
    "Q4_1": (q4_1, 32),
    "Q5_0": (q5_0, 32),
    "Q8_0": (q8_0, 32),
    "IQ4_NL": (iq4_nl, 32),
    "IQ4_XS": (iq4_xs, 256),
    "MXFP4": (mxfp4, 32),
    "Q4_K": (q4_k, 256),
    "Q5_K": (q5_k, 256),
    "Q6_K": (q6_k, 256),
}
"""The function that makes a block, and how many weights a block has."""


MOST = 4096
"""Blocks of a matrix that are made; larger matrices repeat them in random order."""


UNREADABLE = (lambda random: (bytes(32), [0.0] * 32)), 32
"""Blocks of a kind that gguf cannot turn into numbers."""


def random_matrix(kind, rows, columns, random):
    """Return the rows' bytes, (N, bytes) uint8, and a function of their weights in float64."""
    make, size = BLOCKS[kind]
    count = rows * columns // size
    blocks = [make(random) for _ in range(min(count, MOST))]
    which = random.integers(MOST, size=count) if count > MOST else np.arange(count)
    data, weights = (np.array(it) for it in zip(*((list(it), numbers) for it, numbers in blocks)))
    data = data.astype(np.uint8)[which].reshape(rows, -1)
    return data, lambda: torch.from_numpy(weights[which]).reshape(rows, columns)


def random_tensor(kind, shape, random):
    """Return the bytes of a tensor, its type for the writer, and a function of its numbers."""
    if kind in BLOCKS:
        rows, numbers = random_matrix(kind, math.prod(shape[:-1]), shape[-1], random)
        data = rows.reshape(*shape[:-1], -1)
        return data, GGMLQuantizationType[kind], lambda: numbers().reshape(shape)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    data, numbers = random_values(dtype, shape, random)
    return data, GGMLQuantizationType.BF16 if kind == "BF16" else None, numbers


def random_values(dtype, shape, random):
    """Return numbers of a dtype, as the writer takes them, and a function of those in float64."""
    mean = 1.0 if len(shape) == 1 else 0.0
    numbers = (torch.from_numpy(random.normal(mean, 0.06, shape))).to(dtype)
    data = numbers.view(torch.uint8) if dtype == torch.bfloat16 else numbers
    return data.numpy(), numbers.double


# -------------------------------------------------------------------------------------------- files


def model_rows(weight, heads):
    """Undo the order of queries and keys in a Llama's file, where pairs to rotate are adjacent."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def write_gguf(path, kind, architecture="llama", kinds=None, is_returned=True, **sizes):
    """Write a model whose matrices are of a kind.

    ``kinds`` has other ones, by parts of the model's names.

    Returns:
        The model in float64 that the file stands for, if ``is_returned``.
    """
    random = np.random.default_rng(0)
    make, own_sizes = ARCHITECTURES[architecture]
    config = make(**(SIZES | own_sizes | sizes))
    with torch.device("cpu" if is_returned else "meta"):
        # transformers' default for experts has no float64.
        options = {"experts_implementation": "eager"} if architecture in MIXTURES else {}
        exact = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **options).eval()
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture in MIXTURES:
        add_experts(writer, config)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in named_tensors(exact):
        chosen = next((it for part, it in (kinds or {}).items() if part in name), kind)
        if weight.dim() == 1 or "mlp.gate." in name or "expert_gate" in name:
            chosen = "F32"
        for in_file, part in tensors_in_file(name, weight.data):
            shape = part.squeeze(0).shape
            own_kind = (kinds or {}).get(in_file.split(".")[-2], chosen)
            data, raw, numbers = random_tensor(own_kind, shape, random)
            writer.add_tensor(in_file, data, raw_dtype=raw)
            if is_returned:
                number_of_heads = next((it for part, it in heads.items() if part in name), None)
                is_permuted = architecture == "llama" and number_of_heads is not None
                own = model_rows(numbers(), number_of_heads) if is_permuted else numbers()
                part.copy_(own.reshape(part.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact if is_returned else None


def add_experts(writer, config):
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "minimax_m2":
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def named_tensors(model):
    """Yield the parameters of a model, and the buffers that a file has."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            yield name, buffer


# --------------------------------------------------------------------------------- linear attention


QWEN35 = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "tie_word_embeddings": True,
}
LINEAR_LAYER = LAYER | {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "post_attention_layernorm": "post_attention_norm",
}


def write_qwen35(path, kind, kinds=None, is_mixture=False):
    """Write a small Qwen3.5, whose value heads and columns of ``ssm_out`` have another order.

    ``kinds`` has other ones for matrices of experts, by their names in the file.

    Returns:
        The numbers of experts in float64, by their names in the file.
    """
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    random = np.random.default_rng(0)
    with torch.device("meta"):
        if is_mixture:
            sizes = QWEN35 | EXPERTS | {"shared_expert_intermediate_size": 512}
            model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**sizes))
        else:
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**QWEN35))
    config, architecture = model.config, "qwen35moe" if is_mixture else "qwen35"
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if is_mixture:
        add_experts(writer, config)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_uint32(f"{architecture}.full_attention_interval", 2)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim // 4)
    writer.add_rope_dimension_sections([4, 2, 2, 0])
    writer.add_token_list([str(it) for it in range(config.vocab_size)])
    numbers = {}
    for name, weight in model.named_parameters():
        chosen = "F32"
        if name.endswith(("_proj.weight", "qkv.weight", "_z.weight", "up_proj", "down_proj")):
            chosen = kind
        elif "embed" in name:
            chosen = "Q8_0"
        for in_file, part in tensors_in_file(name, weight, name_in_qwen35):
            own_kind = (kinds or {}).get(in_file.split(".")[-2], chosen)
            data, raw, of_tensor = random_tensor(own_kind, part.squeeze().shape, random)
            if part.dim() == 3 and "experts" in name:
                numbers[in_file] = of_tensor()
            if name.endswith("A_log"):
                data = -np.exp(data)
            writer.add_tensor(in_file, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def name_in_qwen35(name):
    module, _, last = name.rpartition(".")
    if module in OTHERS:
        return f"{OTHERS[module]}.{last}"
    _, _, number, within = module.split(".", 3)
    if last in ("A_log", "dt_bias"):
        return f"blk.{number}.{'ssm_a' if last == 'A_log' else 'ssm_dt.bias'}"
    return f"blk.{number}.{LINEAR_LAYER[within]}.{last}"
