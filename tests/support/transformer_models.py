"""Small models of Hugging Face transformers with random weights, shared by several tests."""

import torch
import transformers
from support.exact import Doubles, exact_copy

import foo_ops.integrations.transformers  # registers "foo"

VOCABULARY = 97
WINDOW = 6
"""Shorter than the sequences of these tests, so that windows and chunks matter."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    # Larger than usual: with nearly equal scores, a wrong mask would hardly show.
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Each model asks for its mask in a different way.
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral: windows": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2: softcap, windows in every second layer": lambda: transformers.Gemma2Config(
        **GROUPED, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gpt_oss: sinks, windows in every second layer": lambda: transformers.GptOssConfig(
        **GROUPED, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen2_moe: windows that only the mask tells of": lambda: transformers.Qwen2MoeConfig(
        **GROUPED,
        **EXPERTS,
        shared_expert_intermediate_size=32,
        sliding_window=WINDOW,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    "llama4: chunks": lambda: transformers.Llama4TextConfig(
        **GROUPED, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=64
    ),
}
ENCODERS = {
    "bert": lambda: transformers.BertConfig(**SIZES, hidden_act="gelu"),
    "modernbert: windows on both sides": lambda: transformers.ModernBertConfig(
        **SIZES,
        local_attention=WINDOW,
        global_attn_every_n_layers=2,
        cls_token_id=None,
        sep_token_id=None,
    ),
}

FAMILIES = {
    **DECODERS,
    **{
        name: lambda name=name, sizes=sizes: getattr(transformers, f"{name}Config")(**sizes)
        for name, sizes in {
            "Gemma": GROUPED,
            "Gemma3Text": {**GROUPED, "sliding_window": WINDOW},
            "Qwen2": {**SIZES, "num_key_value_heads": 2},
            "Qwen3": GROUPED,
            "Mixtral": {**GROUPED, "num_local_experts": 4},
            "Cohere": {**SIZES, "num_key_value_heads": 2, "logit_scale": 1.0},
            "Glm": GROUPED,
            "Phi": SIZES,
            "Phi3": {**SIZES, "num_key_value_heads": 2},
            "GPT2": {**SIZES, "n_inner": 64},
        }.items()
    },
}
"""Models that `apply` changes: the decoders, and others with modules of their own form."""


def build(auto_class, config, device="cpu", dtype=torch.float32, **changes):
    """Build a model with random weights, equal for every device and dtype."""
    config = config()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    # Other implementations of experts count integers with torch.histc, but not on the cpu.
    model = auto_class.from_config(config, experts_implementation="eager")
    return model.to(device=device, dtype=dtype).eval()


def decoder(name, device="cpu", dtype=torch.float32, **changes):
    return build(transformers.AutoModelForCausalLM, FAMILIES[name], device, dtype, **changes)


def encoder(name, device="cpu", dtype=torch.float32):
    return build(transformers.AutoModel, ENCODERS[name], device, dtype)


def tokens(*shape):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def padding(side, length):
    """Return which positions hold a token, for three sequences; the first has no padding."""
    counts = torch.tensor([length, length - 3, 4])[:, None]
    positions = torch.arange(length)
    return (positions >= length - counts) if side == "left" else (positions < counts)


def run(model, implementation, *inputs, **options):
    """Return a model's first output on the cpu; None is the model's own implementation."""
    if implementation is not None:
        model.set_attn_implementation(implementation)
    device = model.device
    options = {
        name: option.to(device) if isinstance(option, torch.Tensor) else option
        for name, option in options.items()
    }
    with torch.no_grad():
        output = model(*(each.to(device) for each in inputs), **options)[0]
    return output.cpu()


def run_exactly(model, *inputs, **options):
    """Return the first output of the model with its own attention, in float64 throughout."""
    twin = exact_copy(model)
    with Doubles():
        return run(twin, "eager", *inputs, **options)


def rounded(weight, bits, is_transposed):
    """Return a weight, or those of all experts, rounded to ``bits``."""
    matrix = weight.detach().cpu()
    matrix = matrix.mT if is_transposed else matrix
    rows = matrix.flatten(0, -2)
    group_size = None if bits == 8 else 64 if rows.shape[1] % 64 == 0 else 32
    rows = foo_ops.dequantize_weight(*foo_ops.quantize_weight(rows, bits, group_size))
    numbers = rows.unflatten(0, matrix.shape[:-1])
    return torch.nn.Parameter((numbers.mT if is_transposed else numbers).double())
