"""A Llama is read from a GGUF file (Q4_0) and from an AWQ folder, and decodes with the weights as
they are there, beside the same numbers in floating point.

Its weights are random, rounded and written here as the two formats define it, since only speed and
agreement matter. Run it with ``make examples``, or

    python examples/checkpoints.py --layers 4 --dtype float32
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file
from side_by_side import median_seconds, positive, show
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import foo_ops.integrations.transformers as foo

WIDTHS: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000}
HEADS = {"q_proj": 16, "k_proj": 4}

LARGEST_DIFFERENCE = 32
"""Largest difference of logits, in roundoffs of the largest logit."""


def llama(layers: int) -> Any:
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**WIDTHS, **heads, num_hidden_layers=layers)).eval()


# --------------------------------------------------------------------------------------------- GGUF


def q4_0(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to Q4_0; return the rows' bytes and their numbers.

    A block is a float16 scale and 32 integers, those of the first half in the lower bits; a weight
    is (integer - 8) * scale.
    """
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half()
    integers = (groups / scale.float()).round().clamp(-8, 7).add(8).to(torch.uint8)
    lower, upper = integers.chunk(2, -1)
    blocks = torch.cat((scale.view(torch.uint8), lower | upper << 4), -1)
    return blocks.flatten(1), ((integers.float() - 8) * scale.float()).flatten(1)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, model: Any) -> dict[str, Any]:
    """Write all matrices in Q4_0, and round the model's own; return how to load the file."""
    config = model.config
    writer = GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, weight in model.named_parameters():
        in_file = name
        for theirs, ours in NAMES.items():
            in_file = in_file.replace(theirs, ours)
        if weight.dim() == 1:
            writer.add_tensor(in_file, weight.numpy())
            continue
        rows, weight.data = q4_0(weight)
        for kind, heads in HEADS.items():
            if kind in name:
                # Adjacent rows of a query or key are rotated together in llama.cpp.
                rows = rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(in_file, rows.numpy(), raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"gguf_file": "model.gguf"}


# ---------------------------------------------------------------------------------------------- AWQ


GROUP_SIZE = 128
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each nibble in an int32, from the lowest on."""


def in_words(integers: Tensor) -> Tensor:
    """Pack 8 columns at a time into an int32."""
    nibbles = integers.long().unflatten(1, (-1, 8))[..., list(ORDER)]
    words = (nibbles << 4 * torch.arange(8)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Round to AWQ; return a layer's tensors, which are transposed, and its numbers.

    Each group of 128 weights has a float16 scale and a zero; a weight is (integer - zero) * scale.
    """
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((highest - lowest) / 15).half()
    zero = (-lowest / scale).round().clamp(0, 15)
    integers = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    tensors = {
        "qweight": in_words(integers.flatten(1).t()),
        "qzeros": in_words(zero.t()),
        "scales": scale.t().contiguous(),
    }
    return tensors, ((integers - zero[..., None]) * scale[..., None].float()).flatten(1)


def write_awq(folder: Path, model: Any) -> dict[str, Any]:
    """Write linear layers but the head in 4 bits, and round the model's own."""
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            stored, module.weight.data = awq(module.weight)
            tensors |= {f"{name}.{last}": tensor for last, tensor in stored.items()}
        elif hasattr(module, "weight"):
            tensors[f"{name}.weight"] = module.weight.half()
            module.weight.data = tensors[f"{name}.weight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm"}
    described = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": quantization | {"zero_point": True},
    }
    (folder / "config.json").write_text(json.dumps(described))
    return {}


# ----------------------------------------------------------------------------------------- decoding


class Decoder:
    """A model that has read a prompt into its cache."""

    @torch.no_grad()
    def __init__(self, model: Any, prompt: Tensor) -> None:
        self.model = foo.apply(model)
        self.cache = DynamicCache(config=model.config)
        self.model(prompt, past_key_values=self.cache, logits_to_keep=1)

    @torch.no_grad()
    def decode(self, continuation: Tensor) -> Tensor:
        """Return the logits after each token, (tokens, vocabulary), and restore the cache."""
        outputs = [
            self.model(token, past_key_values=self.cache).logits[:, -1].float()
            for token in continuation.split(1, dim=1)
        ]
        self.cache.crop(-continuation.shape[1])
        return torch.cat(outputs)


class Measurement(NamedTuple):
    """The size of a file, the time to load it in seconds, and tokens per second.

    Attributes:
        difference: of the logits, relative to the largest.
    """

    megabytes: float
    load: float
    packed: float
    dequantised: float
    difference: float


WRITERS: dict[str, Callable[[Path, Any], dict[str, Any]]] = {
    "GGUF, Q4_0": write_gguf,
    "AWQ, groups of 128": write_awq,
}


@torch.no_grad()
def measure(
    write: Callable[[Path, Any], dict[str, Any]], model: Any, dtype: torch.dtype, options: Any
) -> Measurement:
    """Write a model, and compare it with the numbers that it was rounded to."""
    with tempfile.TemporaryDirectory() as folder:
        how = write(Path(folder), model)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        start = time.perf_counter()
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how)
        load = time.perf_counter() - start
    prompt, continuation = (
        torch.randint(WIDTHS["vocab_size"], (1, count)) for count in (64, options.tokens)
    )
    packed, dequantised = Decoder(loaded, prompt), Decoder(model.to(dtype), prompt)
    seconds = median_seconds(
        {
            "packed": partial(packed.decode, continuation),
            "dequantised": partial(dequantised.decode, continuation),
        },
        options.rounds,
    )
    ours, theirs = packed.decode(continuation), dequantised.decode(continuation)
    return Measurement(
        megabytes=size / 1e6,
        load=load,
        packed=options.tokens / seconds["packed"],
        dequantised=options.tokens / seconds["dequantised"],
        difference=((ours - theirs).abs().max() / theirs.abs().max()).item(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--tokens", type=positive, default=32, help="to decode")
    parser.add_argument("--rounds", type=positive, default=3, help="of the comparison of speed")
    options = parser.parse_args(arguments)

    dtype, model = getattr(torch, options.dtype), llama(options.layers)
    measured = {
        name: measure(write, copy.deepcopy(model), dtype, options)
        for name, write in WRITERS.items()
    }
    rows = [
        (
            name,
            f"{each.megabytes:,.0f}",
            f"{each.load:.2f}",
            f"{each.packed:,.1f}",
            f"{each.dequantised:,.1f}",
            f"{each.difference:.1e}",
        )
        for name, each in measured.items()
    ]
    header = ("file", "MB", "load, s", "tokens/s", "dequantised, tokens/s", "logits off by")
    title = f"Llama of {options.layers} layers, {options.dtype}, {torch.get_num_threads()} threads"
    show(title, header, rows)
    print("off by: the most, relative to the largest logit of the dequantised model")
    if max(it.difference for it in measured.values()) > LARGEST_DIFFERENCE * torch.finfo(dtype).eps:
        sys.exit("The logits differ.")


if __name__ == "__main__":
    main()
