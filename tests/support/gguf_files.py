"""Write GGUF files, block by block as ggml-common.h of llama.cpp defines them."""

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

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
ARCHITECTURES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
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
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_in_file(name):
    """Return the GGUF name of a parameter of a Llama."""
    module, _, last = name.rpartition(".")
    if module in OTHERS:
        return f"{OTHERS[module]}.{last}"
    _, _, number, within = module.split(".", 3)
    return f"blk.{number}.{LAYER[within]}.{last}"


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
    "Q4_K": (q4_k, 256),
    "Q5_K": (q5_k, 256),
    "Q6_K": (q6_k, 256),
}
"""The function that makes a block, and how many weights a block has."""


MOST = 4096
"""Blocks of a matrix that are made; larger matrices repeat them in random order."""


def random_matrix(kind, rows, columns, random):
    """Return the rows' bytes, (N, bytes) uint8, and a function of their weights in float64."""
    make, size = BLOCKS[kind]
    count = rows * columns // size
    blocks = [make(random) for _ in range(min(count, MOST))]
    which = random.integers(MOST, size=count) if count > MOST else np.arange(count)
    data, weights = (np.array(it) for it in zip(*((list(it), numbers) for it, numbers in blocks)))
    data = data.astype(np.uint8)[which].reshape(rows, -1)
    return data, lambda: torch.from_numpy(weights[which]).reshape(rows, columns)


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
    config = ARCHITECTURES[architecture](**(SIZES | sizes))
    with torch.device("cpu" if is_returned else "meta"):
        exact = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
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
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in exact.named_parameters():
        chosen = next((it for part, it in (kinds or {}).items() if part in name), kind)
        if weight.dim() == 1:
            chosen = "F32"
        if chosen in BLOCKS:
            data, numbers = random_matrix(chosen, *weight.shape, random)
        else:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[chosen]
            data, numbers = random_values(dtype, weight.shape, random)
        if is_returned:
            number_of_heads = next((it for part, it in heads.items() if part in name), None)
            is_permuted = architecture == "llama" and number_of_heads is not None
            weight.data = model_rows(numbers(), number_of_heads) if is_permuted else numbers()
        raw = None if chosen in ("F32", "F16") else GGMLQuantizationType[chosen]
        writer.add_tensor(name_in_file(name), data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact if is_returned else None


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


def write_qwen35(path, kind):
    """Write a small Qwen3.5, whose value heads and columns of ``ssm_out`` have another order."""
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    random, config = np.random.default_rng(0), Qwen3_5TextConfig(**QWEN35)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    writer = GGUFWriter(path, "qwen35")
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_uint32("qwen35.full_attention_interval", 2)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim // 4)
    writer.add_rope_dimension_sections([4, 2, 2, 0])
    writer.add_token_list([str(it) for it in range(config.vocab_size)])
    for name, weight in model.named_parameters():
        in_file = name_in_qwen35(name)
        if name.endswith(("_proj.weight", "qkv.weight", "_z.weight")):
            data, _ = random_matrix(kind, *weight.shape, random)
        elif "embed" in name:
            data, _ = random_matrix("Q8_0", *weight.shape, random)
        else:
            data, _ = random_values(torch.float32, weight.squeeze().shape, random)
        if name.endswith("A_log"):
            data = -np.exp(data)
        kinds = {np.dtype(np.uint8): GGMLQuantizationType["Q8_0" if "embed" in name else kind]}
        writer.add_tensor(in_file, data, raw_dtype=kinds.get(data.dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def name_in_qwen35(name):
    module, _, last = name.rpartition(".")
    if module in OTHERS:
        return f"{OTHERS[module]}.{last}"
    _, _, number, within = module.split(".", 3)
    if last in ("A_log", "dt_bias"):
        return f"blk.{number}.{'ssm_a' if last == 'A_log' else 'ssm_dt.bias'}"
    return f"blk.{number}.{LINEAR_LAYER[within]}.{last}"
