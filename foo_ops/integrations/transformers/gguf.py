"""GGUF files, with linear layers and embeddings in the bits that the file has.

transformers turns all weights into float32, or keeps them for kernels of GPUs. With this package
imported, a model that is loaded without a GPU keeps them in 4 or 8 bits:

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model-Q4_K_M.gguf")
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.gguf.dequant import GGML_NAME
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, get_gguf_plan
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from foo_ops.integrations.transformers.checkpoints import is_on_host
from foo_ops.integrations.transformers.gguf_blocks import integers_of, row_bytes
from foo_ops.integrations.transformers.memory import Mappings, trim
from foo_ops.integrations.transformers.packed import FooPackedEmbedding, FooPackedLinear, Integers

METHOD = "gguf"
VALUES = ("F32", "F16", "BF16")
"""Kinds of tensors that are not quantised."""

# -------------------------------------------------------------------------------------------- files


class Stored(NamedTuple):
    """A quantised matrix of a file.

    Attributes:
        kind: gguf's name of its type.
        rows: the model's rows as indices of those that are loaded; None if they are the same.
        columns: the model's inputs in the order of the file's columns, likewise.
    """

    kind: str
    rows: Tensor | None = None
    columns: Tensor | None = None


class Names:
    """The parts of a model that transformers reads to translate names, without its layers.

    For each submodule, transformers makes a table of all names, for tensors that are named as in a
    model without its head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        self.state_dict = model.state_dict
        self.children = model.named_children

    def named_children(self) -> list[tuple[str, Names]]:
        own = self.children()
        return [(name, Names(it)) for name, it in own if isinstance(it, PreTrainedModel)]


class GgufFile:
    """A file whose tensors are to be loaded into a model, which is on the meta device.

    Attributes:
        names: the model's names of the file's tensors.
        kept: matrices that stay quantised, by the file's names.
    """

    def __init__(self, path: str, model: Any) -> None:
        from gguf import GGUFReader

        # A private mapping, as torch wants it, though nothing is written.
        reader: Any = GGUFReader(path, "c")
        self.tensors = reader.tensors
        architecture = reader.get_field("general.architecture").contents()
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self.processor = processor(config=model.config.to_dict())
        self.names: dict[str, str] = get_gguf_hf_weights_map(Names(model), self.processor)
        self.kept = self.put_into(model)

    def put_into(self, model: Any) -> dict[str, Stored]:
        """Replace the modules of matrices that stay quantised, and return these."""
        found: dict[str, Stored] = {}
        for tensor in self.tensors:
            name, kind = self.names.get(tensor.name, ""), tensor.tensor_type.name
            if not name.endswith(".weight") or kind in VALUES:
                continue
            require_readable(tensor)
            order = self.order_of(tensor)
            if order is None:
                continue
            is_same = torch.equal(order, torch.arange(len(order), device="cpu"))
            stored = Stored(kind, None if is_same else order)
            if put(model, name, stored, tuple(map(int, reversed(tensor.shape)))):
                found[tensor.name] = stored
        return found

    def order_of(self, tensor: Any) -> Tensor | None:
        """Return where the model's rows are in the file, or None for more than another order.

        transformers' processors take numbers; numbers of rows show what becomes of them.
        """
        rows = np.arange(len(tensor.data))[:, None]
        try:
            made = self.processor.process(weights=rows, name=tensor.name)
        except (TypeError, ValueError, AttributeError):  # one that needs all numbers
            return None
        if made.weights.shape != rows.shape:
            return None
        order = np.ascontiguousarray(made.weights[:, 0])
        return torch.from_numpy(order) if (np.sort(order) == rows[:, 0]).all() else None

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors by the model's names; matrices that stay quantised lie in the file."""
        from gguf import dequantize

        tensors: dict[str, Tensor] = {}
        mappings = Mappings()
        for tensor in self.tensors:
            if tensor.name in self.kept:
                tensors[self.names[tensor.name]] = torch.from_numpy(tensor.data)
                continue
            require_readable(tensor)
            numbers = dequantize(tensor.data, tensor.tensor_type)
            made = self.processor.process(
                weights=numbers,
                name=tensor.name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": tensors},
            )
            if made.name in self.names:
                own = np.array(made.weights, order="C")
                tensors[self.names[made.name]] = torch.from_numpy(own).to(dtype)
            mappings.release(torch.from_numpy(tensor.data))
        return tensors


def require_readable(tensor: Any) -> None:
    """Refuse a kind that gguf cannot turn into numbers."""
    from gguf import GGML_QUANT_SIZES, dequantize

    _, size = GGML_QUANT_SIZES[tensor.tensor_type]
    try:
        dequantize(np.zeros((1, size), np.uint8).view(tensor.data.dtype), tensor.tensor_type)
    except NotImplementedError:
        raise NotImplementedError(
            f"gguf: {tensor.name} is {tensor.tensor_type.name}, which cannot be read"
        ) from None


# ---------------------------------------------------------------------------------------- quantizer


class StoredBlocks(nn.Module):
    """Stands for a linear layer or an embedding while its blocks are loaded."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, own: Any, stored: Stored) -> None:
        super().__init__()
        self.padding_idx = getattr(own, "padding_idx", None)
        self.is_linear = isinstance(own, nn.Linear)
        self.stored = stored
        rows, columns = own.weight.shape
        blocks = torch.empty(
            (rows, row_bytes(stored.kind, columns)), dtype=torch.uint8, device=own.weight.device
        )
        self.weight = nn.Parameter(blocks, requires_grad=False)
        self.register_parameter("bias", own.bias if self.is_linear else None)

    def read(self, blocks: Tensor, dtype: torch.dtype, mappings: Mappings) -> Integers:
        kind, rows, columns = self.stored
        if rows is not None:
            blocks = blocks[rows.to(blocks.device)]
        order = None if columns is None else columns.to(blocks.device)
        return integers_of(blocks, kind, dtype, mappings.release)._replace(order=order)

    def packed(self, integers: Integers) -> nn.Module:
        if not self.is_linear:
            return FooPackedEmbedding(integers, self.padding_idx)
        return FooPackedLinear(integers, self.bias)


def put(model: Any, name: str, stored: Stored, shape: tuple[int, ...] | None = None) -> bool:
    """Let modules stand for the owners of a weight, and of those tied to it; return whether.

    All of them must be linear layers or embeddings, with a weight of the given shape.
    """
    tied = [it for it, source in model.all_tied_weights_keys.items() if source == name]
    owners = [it.rpartition(".")[0] for it in (name, *tied)]
    try:
        modules: list[Any] = [model.get_submodule(it) for it in owners]
    except AttributeError:
        return False
    if any(type(it) not in (nn.Linear, nn.Embedding) for it in modules):
        return False
    if any(tuple(it.weight.shape) != (shape or it.weight.shape) for it in modules):
        return False
    if stored.columns is not None and nn.Embedding in map(type, modules):
        return False
    for owner, module in zip(owners, modules):
        model.set_submodule(owner, StoredBlocks(module, stored))
    return True


class FooGgufQuantizer(GgufHfQuantizer):
    """transformers' quantizer of GGUF, which keeps the weights on CPUs and ``foo``.

    It is transformers' own with a GPU, and if the configuration says ``dequantize=True``. Of some
    architectures transformers keeps the blocks itself, for kernels of GPUs (``supported``): of
    these it loads the blocks, by conversions of its own.
    """

    file: GgufFile | None = None

    @property
    def is_ours(self) -> bool:
        if not is_on_host() or self.quantization_config.dequantize:
            return False
        return not self.supported or bool(self.header.has_quantized_weights)

    def validate_environment(self, *arguments: Any, **keywords: Any) -> None:
        if not (self.supported and self.is_ours):
            super().validate_environment(*arguments, **keywords)

    def update_dtype(self, dtype: torch.dtype | None) -> Any:
        if not self.is_ours:
            return super().update_dtype(dtype)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        return self.dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **keywords: Any
    ) -> None:
        if not self.is_ours:
            super()._process_model_before_weight_loading(model, **keywords)
        elif self.supported:
            self.mapping = get_gguf_conversion_mapping(self.header.architecture, model.config)
            self.quantized, packable, columns = get_gguf_plan(self.header, self.mapping)
            for name, number in packable.items():
                stored = Stored(GGML_NAME[number], columns=columns.get(name))
                if put(model, name, stored):
                    self.packed_modules[name] = stored
        else:
            self.file = GgufFile(checkpoint_files[0], model)

    def get_state_dict(self, checkpoint_file: str, model: Any) -> Any:
        if self.file is None:
            return super().get_state_dict(checkpoint_file, model)
        return self.file.state_dict(self.dtype)

    def _process_model_after_weight_loading(self, model: Any, **keywords: Any) -> Any:
        if not self.is_ours:
            return super()._process_model_after_weight_loading(model, **keywords)
        # Tied modules share a parameter.
        places: dict[Tensor, list[tuple[str, StoredBlocks]]] = defaultdict(list)
        for name, module in model.named_modules():
            if isinstance(module, StoredBlocks):
                places[module.weight].append((name, module))
        mappings = Mappings()
        with torch.inference_mode(False), torch.no_grad():
            while places:
                blocks, modules = places.popitem()
                integers = modules[0][1].read(blocks.detach(), self.dtype, mappings)
                for name, module in modules:
                    model.set_submodule(name, module.packed(integers).train(module.training))
                mappings.release(blocks)
        trim()
        if self.supported:
            # Conversions of blocks are no use for saving.
            model._weight_conversions = None
        self.file = None
        return model

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained: gradients flow through the layers."""
        return self.is_ours or bool(super().is_trainable)


def register_gguf() -> None:
    AUTO_QUANTIZER_MAPPING[METHOD] = FooGgufQuantizer
