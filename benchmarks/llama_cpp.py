"""Runs a Llama of transformers by llama.cpp, if llama-cpp-python and gguf are installed.

They are not part of an extra: llama-cpp-python is compiled on installation, which takes a quarter
of an hour.
"""

from __future__ import annotations

import tempfile
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from benchmarks.measure import stay_awake
from benchmarks.own_process import OwnProcess

TYPES = {"float32": "F32", "bfloat16": "BF16", "8 bits": "Q8_0", "4 bits": "Q4_0"}
"""Types of weights, by gguf's names; those of few bits have a scale for each 32 weights."""

OF_MODEL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
OF_LAYER = {
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


class LlamaCpp:
    """A model in llama.cpp that has read a prompt.

    It decodes some tokens again and again, or reads the prompt again and again.

    Raises ModuleNotFoundError if llama.cpp is not installed.

    Args:
        model: a Llama of transformers.
        tokens: the prompt, and the token that follows.
        weights: a key of `TYPES`.
        decoded: how many tokens a call decodes; 0 reads the prompt.
        compared: returns substitutes for the logits to compare, as weights of few bits change
            these.
    """

    def __init__(
        self,
        model: Any,
        tokens: Sequence[int],
        weights: str,
        decoded: int,
        compared: Callable[[], list[Tensor]] | None = None,
    ) -> None:
        self.compared = compared
        *prompt, last = tokens
        self.process = OwnProcess("benchmarks.llama_cpp:Server")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write(path, model, weights)
            self.process.request("prepare", str(path), prompt, last, weights == "float32", decoded)

    def results(self) -> list[Tensor]:
        if self.compared is not None:
            return self.compared()
        return [torch.from_numpy(self.process.request("logits"))]

    def time(self, calls: int, threads: int) -> float:
        return self.process.request("time", calls, threads)


class Server:
    """A model in llama.cpp, in a process of its own, which is all that ends if it crashes.

    llama-cpp-python 0.3.36 does with weights of 8 and 4 bits where it multiplies them by AMX.
    """

    def prepare(
        self, path: str, prompt: list[int], last: int, has_float32_cache: bool, decoded: int
    ) -> None:
        import llama_cpp

        self.library: Any = llama_cpp
        self.prompt, self.last, self.decoded = prompt, last, decoded
        options: dict[str, Any] = {}
        if has_float32_cache:
            options = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
        room = len(prompt) + 1 + decoded
        # Read, not mapped, so that the file can be deleted.
        self.model = llama_cpp.Llama(
            path, n_ctx=room, n_batch=room, n_ubatch=room, use_mmap=False, verbose=False, **options
        )
        self.read_prompt()

    def read_prompt(self) -> None:
        self.model.reset()
        self.model.eval(self.prompt)

    def decode(self) -> None:
        # Drop the cached tokens behind the prompt.
        self.model.n_tokens = len(self.prompt)
        for _ in range(self.decoded):
            self.model.eval([self.last])

    def run(self) -> None:
        if self.decoded:
            self.decode()
        else:
            self.read_prompt()

    def logits(self) -> Any:
        """Return the last token's logits, (1, 1, classes), a NumPy array."""
        self.run()
        numbers = self.library.llama_get_logits_ith(self.model.ctx, -1)
        return numpy.array(numbers[: self.model.n_vocab()], numpy.float32)[None, None]

    def time(self, calls: int, threads: int) -> float:
        self.library.llama_set_n_threads(self.model.ctx, threads, threads)
        stay_awake()
        return timeit.timeit(self.run, number=calls)


def add_sizes(file: Any, config: Any) -> None:
    """Write the sizes of a Llama into the header of a file of llama.cpp."""
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)


def write(path: Path, model: Any, weights: str) -> None:
    """Write a model without a tokenizer to a file of llama.cpp."""
    import gguf

    config = model.config
    file = gguf.GGUFWriter(str(path), "llama")
    add_sizes(file, config)
    file.add_rope_dimension_count(config.head_dim)
    file.add_rope_freq_base(config.rope_parameters["rope_theta"])
    file.add_tokenizer_model("none")
    type_ = gguf.GGMLQuantizationType[TYPES[weights]]
    for name, tensor in named_tensors(model):
        values = tensor.float().contiguous().numpy()
        if tensor.dim() == 1:
            file.add_tensor(name, values)
        else:
            file.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def named_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors by llama.cpp's names, with rotary pairs in its order."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module in OF_MODEL:
            yield f"{OF_MODEL[module]}.weight", tensor
            continue
        _, _, layer, part = module.split(".", 3)
        part = OF_LAYER[part]
        if part in heads:
            # Rotary pairs are adjacent rows in llama.cpp, and half a head apart in transformers.
            tensor = tensor.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
        yield f"blk.{layer}.{part}.weight", tensor
