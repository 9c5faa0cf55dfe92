"""GGUF files, with linear layers, embeddings and experts in the bits that the file has.

transformers turns all weights into float32, or keeps them for kernels of GPUs. With this package
imported, a model that is loaded without a GPU keeps them in 4 or 8 bits:

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model-Q4_K_M.gguf")
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.dequant import GGML_NAME
from transformers.integrations.gguf.reader import GgufHeader
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, get_gguf_plan
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from foo_ops.integrations.transformers.checkpoints import is_on_host
from foo_ops.integrations.transformers.experts import names_of_weights, weights_of
from foo_ops.integrations.transformers.gguf_blocks import (
    TABLES,
    codes_of,
    integers_of,
    joined_integers,
    joined_mxfp4,
    row_bytes,
)
from foo_ops.integrations.transformers.memory import Mappings, trim
from foo_ops.integrations.transformers.mxfp4 import FooMxfp4Experts, can_be_mxfp4
from foo_ops.integrations.transformers.packed import FooPackedEmbedding, FooPackedLinear, Integers
from foo_ops.integrations.transformers.packed_experts import (
    FooPackedExperts,
    Parts,
    can_be_packed,
)

METHOD = "gguf"
VALUES = ("F32", "F16", "BF16")
"""Kinds of tensors that are not quantised."""
EXPERT_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}
SHARED_SIZE = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SIZES = {"qwen2_moe": EXPERT_SIZE | SHARED_SIZE, "qwen3_moe": EXPERT_SIZE}
"""Sizes in files, and their names in configurations, that transformers does not read."""

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


class Place(NamedTuple):
    """The matrices of experts in a file: one of the parts whose rows a model's weight has.

    Attributes:
        weight: the model's name.
        part: the number of the part.
        parts: of the weight.
    """

    weight: str
    part: int
    parts: int

    @property
    def path(self) -> str:
        return self.weight.rpartition(".")[0]


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
        places: of matrices of experts, by the file's names.
        kept: the model's names of matrices that stay quantised, by the file's names.
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
        places = {it.name: self.place_of(it) for it in self.tensors}
        self.places = {name: it for name, it in places.items() if it is not None}
        self.kept = self.put_into(model)

    def put_into(self, model: Any) -> dict[str, str]:
        """Replace the modules of matrices that stay quantised, and return the names of these."""
        found: dict[str, str] = {}
        of_experts: dict[str, tuple[Place, str]] = {}
        for tensor in self.tensors:
            name, kind = self.names.get(tensor.name, ""), tensor.tensor_type.name
            is_expert = tensor.name in self.places
            if not (is_expert or name.endswith(".weight")) or kind in VALUES:
                continue
            require_readable(tensor)
            if is_expert:
                of_experts[tensor.name] = self.places[tensor.name], kind
                continue
            order = self.order_of(tensor)
            if order is None:
                continue
            is_same = torch.equal(order, torch.arange(len(order), device="cpu"))
            stored = Stored(kind, None if is_same else order)
            if put(model, name, stored, tuple(map(int, reversed(tensor.shape)))):
                found[tensor.name] = name
        return found | put_experts(model, of_experts)

    def place_of(self, tensor: Any) -> Place | None:
        """Return where matrices of experts lie in a weight, or None for other tensors.

        As in `order_of`, two rows show what becomes of all.
        """
        if tensor.name.removesuffix(".weight") not in self.names or len(tensor.shape) != 3:
            return None
        found: dict[str, Tensor] = {}
        # A model that is being loaded is made under torch.device("meta").
        with torch.device("cpu"):
            self.processor.process(
                weights=np.ones((1, 2, 1)),
                name=tensor.name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": found},
            )
        if len(found) != 1:
            return None
        ((name, joined),) = found.items()
        part, *others = (joined.flatten().nonzero().flatten() // 2).unique().tolist()
        return None if others else Place(name, part, joined.numel() // 2)

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
                tensors[self.kept[tensor.name]] = torch.from_numpy(tensor.data)
                continue
            require_readable(tensor)
            if tensor.name in self.places:
                self.write_experts(tensor, tensors, dtype)
                mappings.release(torch.from_numpy(tensor.data))
                continue
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

    def write_experts(self, tensor: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Write the numbers of one expert after the other to their rows of the model's weight."""
        from gguf import dequantize

        weight, part, parts = self.places[tensor.name]
        columns, rows, experts = map(int, tensor.shape)
        if weight not in tensors:
            tensors[weight] = torch.zeros(experts, parts * rows, columns, dtype=dtype)
        for numbers, blocks in zip(tensors[weight], tensor.data):
            own = torch.from_numpy(dequantize(blocks, tensor.tensor_type))
            numbers[rows * part : rows * (part + 1)] = own


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


def places_in(header: GgufHeader, mapping: list[Any]) -> dict[str, Place]:
    """Return the places of matrices that transformers' conversions rename, or join by rows."""
    mapping = deepcopy(mapping)  # looking a name up changes it
    renamings = [it for it in mapping if isinstance(it, WeightRenaming)]
    converters = [it for it in mapping if isinstance(it, WeightConverter)]
    found = {}
    for tensor in header.tensors:
        name, pattern = rename_source_key(tensor.name, renamings, converters)
        if pattern is None:
            found[tensor.name] = Place(name, 0, 1)
            continue
        converter = next(it for it in converters if pattern in it.source_patterns)
        if all(isinstance(it, Concatenate) and it.dim == 1 for it in converter.operations):
            sources = converter.source_patterns
            found[tensor.name] = Place(name, sources.index(pattern), len(sources))
    return found


def mapped(header: GgufHeader, names: dict[str, str]) -> dict[str, Tensor]:
    """Return blocks that lie in the file, by the model's names, of tensors with a name in it."""
    # A private mapping, as torch wants it, though nothing is written.
    data = np.memmap(header.path, np.uint8, "c")
    tensors = {}
    for name, shape, _, offset, size in header.tensors:
        if name in names:
            start = header.data_start + offset
            blocks = torch.from_numpy(data[start : start + size])
            tensors[names[name]] = blocks.view(*shape[:-1], -1)
    return tensors


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

    def read(
        self, blocks: Tensor, dtype: torch.dtype, mappings: Mappings, has_table: bool
    ) -> Integers:
        """Convert the blocks.

        Args:
            has_table: whether codes with a table stay as they are, which embeddings do not read.
        """
        kind, rows, columns = self.stored
        if rows is not None:
            blocks = blocks[rows.to(blocks.device)]
        order = None if columns is None else columns.to(blocks.device)
        convert = codes_of if has_table and kind in TABLES else integers_of
        return convert(blocks, kind, dtype, mappings.release)._replace(order=order)

    def packed(self, integers: Integers) -> nn.Module:
        if not self.is_linear:
            return FooPackedEmbedding(integers, self.padding_idx)
        return FooPackedLinear(integers, self.bias)


class StoredExperts(nn.Module):
    """Stands for experts while their blocks are loaded: a parameter for each part of a weight.

    Attributes:
        own: the model's module, which has no memory.
        kinds: of the parts, by the names of weights.
    """

    def __init__(self, own: Any, kinds: dict[str, list[str]]) -> None:
        super().__init__()
        vars(self)["own"] = own
        self.kinds = kinds
        for (name, of_parts), weight in zip(kinds.items(), weights_of(own)):
            experts, rows, columns = weight.shape  # type: ignore[union-attr]
            for part, kind in enumerate(of_parts):
                sizes = experts, rows // len(of_parts), row_bytes(kind, columns)
                blocks = torch.empty(sizes, dtype=torch.uint8, device="meta")
                parameter = nn.Parameter(blocks, requires_grad=False)
                self.register_parameter(name_of_part(name, part), parameter)

    def packed(self, dtype: torch.dtype, mappings: Mappings) -> nn.Module:
        """Return the experts, and release the memory of the blocks."""
        own = vars(self)["own"]
        are_mxfp4 = {kind for kinds in self.kinds.values() for kind in kinds} == {"MXFP4"}
        if are_mxfp4 and can_be_mxfp4(own):
            tensors = {
                name: joined_mxfp4(parts, mappings.release)
                for name, parts in self.taken_parts(mappings)
            }
            return FooMxfp4Experts.of_tensors(own, tensors).train(self.training)
        weights = [
            joined_integers(parts, self.kinds[name], dtype, mappings.release)
            for name, parts in self.taken_parts(mappings)
        ]
        layers = [Parts(name, (name,)) for name in self.kinds]
        # Blocks are not written again.
        formats = dict.fromkeys(self.kinds)
        return FooPackedExperts(own, layers, weights, formats).train(self.training)

    def taken_parts(self, mappings: Mappings) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the names and the parts of weights, and let go of parts that have been read."""
        for name, kinds in self.kinds.items():
            names = [name_of_part(name, part) for part in range(len(kinds))]
            parts = [self.get_parameter(it).detach() for it in names]
            yield name, parts
            for it in names:
                del self._parameters[it]
            for blocks in parts:
                mappings.release(blocks)


def name_of_part(weight: str, part: int) -> str:
    return f"{weight}_{part}"


def put_experts(model: Any, found: dict[str, tuple[Place, str]]) -> dict[str, str]:
    """Let modules stand for experts whose weights are there in full.

    Args:
        found: places and kinds of blocks, by the file's names.

    Returns:
        The names of the parameters that stand for weights, by the file's names.
    """
    by_path: dict[str, dict[str, tuple[Place, str]]] = defaultdict(dict)
    for name, (place, kind) in found.items():
        by_path[place.path][name] = place, kind
    parameters = {}
    for path, tensors in by_path.items():
        try:
            own = model.get_submodule(path)
        except AttributeError:
            continue
        if not can_be_packed(own):
            continue
        kinds = {
            weight: [
                kind
                for place, kind in sorted(tensors.values())
                if place.weight == f"{path}.{weight}"
            ]
            for weight in names_of_weights(own)
        }
        counts = {place.weight: place.parts for place, _ in tensors.values()}
        if any(len(it) != counts.get(f"{path}.{weight}") for weight, it in kinds.items()):
            continue
        model.set_submodule(path, StoredExperts(own, kinds))
        for name, (place, _) in tensors.items():
            parameters[name] = name_of_part(place.weight, place.part)
    return parameters


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

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.file: GgufFile | None = None
        self.in_file: dict[str, str] = {}
        """Names of blocks that are read where they lie, see `put_mapped`."""

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
            self.in_file = self.put_mapped(model)
        else:
            self.file = GgufFile(checkpoint_files[0], model)

    def put_mapped(self, model: Any) -> dict[str, str]:
        """Let modules stand for experts, and return the names of blocks that no conversion changes.

        They are the model's names, by the file's names.
        """
        places = places_in(self.header, self.mapping)
        kinds = {name: GGML_NAME.get(number) for name, number in self.header.ggml_types.items()}
        matrices = {it.name for it in self.header.tensors if len(it.shape) == 3}
        found = {
            name: (place, kind)
            for name, place in places.items()
            if name in matrices and (kind := kinds[name]) is not None
        }
        layers = {
            name: place.weight
            for name, place in places.items()
            if place.parts == 1 and place.weight in self.packed_modules
        }
        return layers | put_experts(model, found)

    def get_state_dict(self, checkpoint_file: str, model: Any) -> Any:
        if self.file is not None:
            return self.file.state_dict(self.dtype)
        state = super().get_state_dict(checkpoint_file, model)
        if not self.in_file:
            return state
        others = {name: it for name, it in state.items() if name not in self.in_file}
        return others | mapped(self.header, self.in_file)

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
                are_linear = all(module.is_linear for _, module in modules)
                integers = modules[0][1].read(blocks.detach(), self.dtype, mappings, are_linear)
                for name, module in modules:
                    model.set_submodule(name, module.packed(integers).train(module.training))
                mappings.release(blocks)
            for name, experts in list(model.named_modules()):
                if isinstance(experts, StoredExperts):
                    model.set_submodule(name, experts.packed(self.dtype, mappings))
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
    # transformers takes the sizes of experts to be those of one checkpoint.
    mapping: dict[str, dict[str, Any]] = GGUF_CONFIG_MAPPING  # type: ignore[assignment]
    for model_type, sizes in SIZES.items():
        mapping[model_type] = sizes | mapping[model_type]
