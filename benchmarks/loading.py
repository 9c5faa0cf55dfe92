"""Times loading of checkpoints of 4 bits beside reading their files, and measures peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import llama_cpp
from benchmarks.measure import OURS, Case, Contenders, Local

SECTION, MEMORY = "loading", "memory of loading"
FILE = "file"
"""The contender that reads the file into memory; for memory, the size of the file."""
MEGABYTE = 1e6
LOADING = """
import json, sys
import accelerate, foo_ops, torch
from foo_ops.integrations.transformers import apply
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

options = json.loads(sys.argv[1])
# Imports and the linker of kernels do not depend on the size of a model.
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 9}
apply(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)))

def in_bytes(name):
    lines = dict(it.split(":") for it in open("/proc/self/status"))
    return 1024 * int(lines[name].split()[0])

before = in_bytes("VmRSS")
apply(AutoModelForCausalLM.from_pretrained(**options, dtype=torch.bfloat16))
print(in_bytes("VmHWM") - before)
"""
"""Prints the peak of memory beside what a process has before it loads a model."""


@dataclass(frozen=True)
class Size:
    """A Llama, or a mixture of Qwen3 if there are experts, whose files have random bits."""

    hidden: int = 2048
    intermediate: int = 5632
    layers: int = 8
    vocabulary: int = 2048
    experts: int = 0

    def mixture(self) -> Size:
        return replace(self, intermediate=min(self.intermediate, 768), experts=8)

    @property
    def name(self) -> str:
        name = f"{self.layers} layers of {self.hidden}"
        return f"{name}, {self.experts} experts" if self.experts else name

    def config(self) -> Any:
        from transformers import LlamaConfig, Qwen3MoeConfig

        sizes: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocabulary,
            "num_attention_heads": self.hidden // 64,
        }
        if not self.experts:
            return LlamaConfig(**sizes)
        sizes["num_key_value_heads"] = self.hidden // 64
        sizes |= {"num_experts": self.experts, "moe_intermediate_size": self.intermediate}
        sizes["head_dim"] = 64
        return Qwen3MoeConfig(**sizes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights, by the names of their modules."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            state = AutoModelForCausalLM.from_config(self.config()).state_dict()
        return {name.removesuffix(".weight"): tuple(it.shape) for name, it in state.items()}


DEFAULT = Size()
QUICK = Size(hidden=256, intermediate=512, layers=1, vocabulary=256)

# ------------------------------------------------------------------------------------------ files


def random_bits(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype)


def awq(rows: int, columns: int) -> dict[str, Tensor]:
    groups = columns // 128
    return {
        "qweight": random_bits(columns, rows // 8),
        "qzeros": random_bits(groups, rows // 8),
        "scales": torch.rand(groups, rows).half(),
    }


def gptq(rows: int, columns: int) -> dict[str, Tensor]:
    return {**awq(rows, columns), "qweight": random_bits(columns // 8, rows)}


PACKED: dict[str, tuple[Callable[[int, int], dict[str, Tensor]], dict[str, Any]]] = {
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}),
}
"""Tensors of a layer, and the description of their format."""
HALVES = {"Q4_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Kinds of GGUF, and where a block has its numbers of float16."""
OF_MIXTURE = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
"""Names of gguf for modules that a Llama does not have."""


def write_packed(folder: Path, kind: str, size: Size) -> Path:
    from safetensors.torch import save_file

    make, described = PACKED[kind]
    tensors = {}
    for name, shape in size.shapes().items():
        if "_proj" in name:
            tensors.update({f"{name}.{last}": it for last, it in make(*shape).items()})
        else:
            tensors[f"{name}.weight"] = torch.rand(shape).half()
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    config = size.config().to_dict() | {"quantization_config": described}
    (folder / "config.json").write_text(json.dumps(config))
    return path


def write_gguf(folder: Path, kind: str, size: Size) -> Path:
    import gguf

    config, path = size.config(), folder / "model.gguf"
    file = gguf.GGUFWriter(str(path), "qwen3moe" if size.experts else "llama")
    llama_cpp.add_sizes(file, config)
    file.add_rope_freq_base(10000.0)
    if size.experts:
        file.add_key_length(config.head_dim)
        file.add_expert_count(size.experts)
        file.add_expert_used_count(config.num_experts_per_tok)
        file.add_expert_feed_forward_length(size.intermediate)
    type_ = gguf.GGMLQuantizationType[kind]
    for name, shape in size.shapes().items():
        for own, of_tensor in tensors_of(name, shape):
            if len(shape) == 1 or own.endswith("ffn_gate_inp"):
                file.add_tensor(f"{own}.weight", torch.ones(of_tensor).numpy())
            else:
                blocks = random_blocks(kind, *of_tensor)
                file.add_tensor(f"{own}.weight", blocks.numpy(), raw_dtype=type_)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def tensors_of(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names in a file of a weight's parts, and their shapes."""
    _, _, inner = name.partition("model.layers.")
    layer, _, last = inner.partition(".")
    if last == "mlp.experts.gate_up_proj":
        experts, rows, columns = shape
        for own in ("ffn_gate_exps", "ffn_up_exps"):
            yield f"blk.{layer}.{own}", (experts, rows // 2, columns)
    else:
        names = llama_cpp.OF_LAYER | OF_MIXTURE
        yield f"blk.{layer}.{names[last]}" if inner else llama_cpp.OF_MODEL[name], shape


def random_blocks(kind: str, *shape: int) -> Tensor:
    import gguf

    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    *others, columns = shape
    blocks = random_bits(*others, columns // weights, size, dtype=torch.uint8)
    for start in HALVES[kind]:
        numbers = torch.rand(*others, columns // weights, 1).half()
        blocks[..., start : start + 2] = numbers.view(torch.uint8)
    return blocks.flatten(-2)


# ------------------------------------------------------------------------------------------ cases


def cases(size: Size, threads: int) -> Iterator[Case]:
    kinds = [(kind, size) for kind in (*PACKED, *HALVES)]
    for kind, own_size in (*kinds, ("Q4_K", size.mixture())):
        for section, make in ((SECTION, contenders), (MEMORY, memory_contenders)):
            name = f"{kind}, {own_size.name}"
            yield Case(section, name, partial(make, kind, own_size), (threads,))


class Checkpoint:
    """A file of a kind, deleted with this object."""

    def __init__(self, kind: str, size: Size) -> None:
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        torch.manual_seed(0)
        if kind in PACKED:
            self.path = write_packed(folder, kind, size)
            self.options: dict[str, Any] = {}
        else:
            self.path = write_gguf(folder, kind, size)
            self.options = {"gguf_file": self.path.name}
        self.options["pretrained_model_name_or_path"] = str(folder)

    def load(self) -> Tensor:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        import foo_ops.integrations.transformers  # noqa: F401

        logging.disable_progress_bar()
        AutoModelForCausalLM.from_pretrained(**self.options, dtype=torch.bfloat16)
        return torch.ones(1)

    def read(self) -> Tensor:
        self.path.read_bytes()
        return torch.ones(1)

    def peak(self) -> float:
        """Return the bytes at the peak of loading, in a process of its own."""
        call = [sys.executable, "-c", LOADING, json.dumps(self.options)]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        return float(done.stdout.splitlines()[-1])


class Measured:
    """A size in bytes, measured once, whose megabytes take the place of seconds."""

    def __init__(self, measure: Callable[[], float]) -> None:
        self.megabytes = measure() / MEGABYTE

    def results(self) -> list[Tensor]:
        return [torch.ones(1)]

    def time(self, calls: int, threads: int) -> float:
        return calls * self.megabytes


def contenders(kind: str, size: Size) -> Contenders:
    checkpoint = Checkpoint(kind, size)
    return {
        OURS: partial(Local, checkpoint.load),
        FILE: partial(Local, checkpoint.read),
    }


def memory_contenders(kind: str, size: Size) -> Contenders:
    checkpoint = Checkpoint(kind, size)
    return {
        OURS: partial(Measured, checkpoint.peak),
        FILE: partial(Measured, lambda: float(checkpoint.path.stat().st_size)),
    }
