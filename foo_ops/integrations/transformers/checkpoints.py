"""Checkpoints whose linear layers have 4 or 8 bits already, with their weights as they are.

transformers asks for packages with kernels of GPUs. With this package imported, a model that is
loaded without a GPU needs none of them:

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct-AWQ")

Which layers are quantised is read from the files, by the names of their tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.modeling_utils import load_state_dict, str_to_torch_dtype
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils import (
    is_bitsandbytes_available,
    is_compressed_tensors_available,
    is_gptqmodel_available,
)
from transformers.utils.quantization_config import TorchAoConfig

from foo_ops.integrations.transformers.bitsandbytes import RENAMED, BitsAndBytes, without_dots
from foo_ops.integrations.transformers.compressed import ConfigReader, described, is_read
from foo_ops.integrations.transformers.experts import names_of_weights
from foo_ops.integrations.transformers.formats import (
    Awq,
    CompressedTensors,
    Format,
    Fp8,
    Gptq,
    UnreadableError,
)
from foo_ops.integrations.transformers.memory import Mappings, trim
from foo_ops.integrations.transformers.packed import FooPackedLinear
from foo_ops.integrations.transformers.packed_experts import (
    FooPackedExperts,
    Parts,
    can_be_packed,
    packed_layers,
    sizes_of_experts,
)
from foo_ops.integrations.transformers.torchao import StoredTorchAo, TorchAo

FORMATS: dict[str, type[Format]] = {
    it.method: it for it in (Awq, Gptq, CompressedTensors, Fp8, BitsAndBytes, TorchAo)
}

# ------------------------------------------------------------------------------------------- files


def tensors_in(files: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint on the meta device."""
    found = {}
    for file in files:
        found.update(load_state_dict(file, map_location="meta"))
    return found


class Names:
    """Finds the modules of a model into which the tensors of a file are loaded."""

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model)
        self.model = model
        self.own = model.state_dict()
        self.renamings = [it for it in mapping if isinstance(it, WeightRenaming)]
        self.converters = [it for it in mapping if isinstance(it, WeightConverter)]

    def by_layer(self, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Sort tensors by layers, with the last parts of their names."""
        found: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            owner, _, last = without_dots(name).rpartition(".")
            # A quantised layer's tensors follow its weight, whose name the model knows.
            found[self.renamed(f"{owner}.weight").removesuffix(".weight")][last] = tensor
        return found

    def renamed(self, weight: str) -> str:
        prefix = self.model.base_model_prefix
        name, _ = rename_source_key(weight, self.renamings, [], prefix, self.own)
        return name

    def experts_of(self, name: str) -> tuple[str, Parts]:
        """Return the experts that have fused a layer, and with which others.

        Raises:
            UnreadableError: if the model has no such layer.
        """
        target, _ = rename_source_key(f"{name}.weight", [], self.converters)
        parts, path = self.parts_of(target), target.rpartition(".")[0]
        if parts is None or target not in self.own or not name.startswith(f"{path}."):
            raise UnreadableError("the model has no such layer")
        experts = self.model.get_submodule(path)
        if not (isinstance(experts, StoredExperts) or can_be_packed(experts)):
            raise UnreadableError("foo::moe_experts does not compute what its experts do")
        return path, parts

    def parts_of(self, weight: str) -> Parts | None:
        """Return the layers of a file whose rows are joined in a weight of experts."""
        converter = self.converter_of(weight)
        if converter is None:
            return None
        layers = tuple(source.split(".")[-2] for source in converter.source_patterns)
        return Parts(weight.rpartition(".")[2], layers)

    def converter_of(self, weight: str) -> WeightConverter | None:
        """Return what joins the layers of a file in a weight of experts, and nothing else."""
        for it in self.converters:
            is_join = all(isinstance(op, (MergeModulelist, Concatenate)) for op in it.operations)
            if is_join and weight.endswith(it.target_patterns[0]):
                return it
        return None


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, Conv1D):
        columns, rows = module.weight.shape
        return rows, columns
    raise UnreadableError(f"{type(module).__name__} is no linear layer")


def is_ignored(model: Any, name: str) -> bool:
    """Whether a model leaves a layer out that its files have."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(it, f"{name}.weight") for it in patterns)


# --------------------------------------------------------------------------------------- quantizer


class StoredLinear(nn.Module):
    """Stands for a linear layer while its tensors are loaded, by their names in the file."""

    bias: nn.Parameter | None

    def __init__(self, format: Format, stored: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.format = format
        self.dtype = dtype
        bias = stored.get("bias")
        given = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
        self.register_parameter("bias", given)
        for name, tensor in stored.items():
            if name != "bias":
                self.register_buffer(name, tensor)

    def packed(self, mappings: Mappings) -> FooPackedLinear:
        """Return the layer, and release the memory of the loaded tensors."""
        stored: Any = dict(self._buffers)
        integers = self.format.read(stored, self.dtype)
        layer = FooPackedLinear(integers, self.bias, self.format.completed(stored))
        self._buffers.clear()
        kept = set(map(start_of, layer.buffers()))
        for tensor in stored.values():
            if start_of(tensor) not in kept:
                mappings.release(tensor)
        return layer.train(self.training)


class StoredExperts(nn.Module):
    """Stands for experts while the tensors of their layers are loaded.

    Attributes:
        own: the model's module, which has no memory.
        parts: found so far.
    """

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        vars(self)["own"] = own
        self.parts: dict[str, Parts] = {}

    def add(self, name: str, parts: Parts, layer: StoredLinear) -> None:
        expert, _, last = name.partition(".")
        if expert not in self._modules:
            self.add_module(expert, nn.Module())
        self.get_submodule(expert).add_module(last, layer)
        self.parts[parts.weight] = parts

    def packed(self, mappings: Mappings) -> FooPackedExperts:
        def read(name: str) -> FooPackedLinear:
            try:
                stored: Any = self.get_submodule(name)
            except AttributeError:
                raise UnreadableError(f"{name} is not quantised as others are") from None
            layer: FooPackedLinear = stored.packed(mappings)
            if layer.order is not None:
                raise UnreadableError("experts must not have act-order")
            return layer

        own: Any = vars(self)["own"]
        names = names_of_weights(own)
        if set(names) != self.parts.keys():
            raise UnreadableError(f"only {', '.join(self.parts)} is quantised")
        parts = [self.parts[it] for it in names]
        return FooPackedExperts.of_layers(own, parts, read).train(self.training)


def start_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FooQuantizer(HfQuantizer):
    """Loads linear layers as they are in the file, for CPUs and ``foo``."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.apart: set[str] = set()
        """Weights of experts, as patterns, whose layers stay apart while they are loaded."""

    @property
    def method(self) -> str:
        method = self.quantization_config.quant_method
        return str(getattr(method, "value", method))

    def _process_model_before_weight_loading(
        self, model: Any, dtype: Any = None, checkpoint_files: Any = None, **keywords: Any
    ) -> None:
        dtype = dtype or torch.get_default_dtype()
        kind = FORMATS[self.method]
        with self.reading("the model"):
            kind.require_files(checkpoint_files)
        names = Names(model)
        for name, stored in names.by_layer(tensors_in(checkpoint_files)).items():
            if not kind.is_in(stored) or is_ignored(model, name):
                continue
            with self.reading(name):
                try:
                    module = model.get_submodule(name)
                except AttributeError:
                    self.store_expert(model, name, names, stored, dtype)
                    continue
                format = kind.find(stored, *sizes_of(module), self.quantization_config)
            model.set_submodule(name, StoredLinear(format, stored, dtype))

    def store_expert(
        self, model: Any, name: str, names: Names, stored: dict[str, Tensor], dtype: torch.dtype
    ) -> None:
        path, parts = names.experts_of(name)
        converter: Any = names.converter_of(f"{path}.{parts.weight}")
        self.apart.update(converter.target_patterns)
        experts = model.get_submodule(path)
        if not isinstance(experts, StoredExperts):
            experts = StoredExperts(experts)
            model.set_submodule(path, experts)
        rows, columns = sizes_of_experts(vars(experts)["own"], parts.weight)
        sizes = rows // len(parts.layers), columns
        format = FORMATS[self.method].find(stored, *sizes, self.quantization_config)
        layer = StoredLinear(format.for_experts(), stored, dtype)
        experts.add(name.removeprefix(f"{path}."), parts, layer)

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """Leave out those that fuse experts, and give all tensors names beside their weights."""
        kept = [it for it in weight_conversions if not self.apart.intersection(it.target_patterns)]
        if self.method != BitsAndBytes.method:
            return kept
        renamings = (WeightRenaming(f".{source}", f".{to}") for source, to in RENAMED.items())
        return [*renamings, *kept]

    def _process_model_after_weight_loading(self, model: Any, **keywords: Any) -> None:
        """Pack the layers, one after the other."""
        mappings = Mappings()
        with torch.inference_mode(False), torch.no_grad():
            # Experts come before their layers, and pack them.
            for kind in (StoredExperts, StoredLinear):
                for name, module in list(model.named_modules()):
                    if isinstance(module, kind):
                        with self.reading(name):
                            model.set_submodule(name, module.packed(mappings))
        trim()
        if self.method == CompressedTensors.method:
            model.config.quantization_config = described(model)

    @contextmanager
    def reading(self, name: str, action: str = "read") -> Iterator[None]:
        """Name the format and the layer in errors."""
        try:
            yield
        except UnreadableError as error:
            raise NotImplementedError(
                f"{self.method}: foo_ops cannot {action} the weights of {name}: {error}"
            ) from None

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of a file."""
        tensors = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, (FooPackedExperts, FooPackedLinear)):
                for last in module._buffers:
                    tensors.pop(f"{name}.{last}", None)
        is_compressed = self.method == CompressedTensors.method
        for name, layer in packed_layers(model):
            format = CompressedTensors.of(layer) if is_compressed else layer.stored_format
            with self.reading(name, "write"):
                if format is None:
                    raise UnreadableError("they were quantised after the file had been read")
                written = format.write(layer)
            tensors.update({f"{name}.{last}": it for last, it in written.items()})
        return tensors, {}

    def is_serializable(self, *arguments: Any, **keywords: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained: gradients flow through the layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


# ------------------------------------------------------------------------------------ registration


BITSANDBYTES = ("bitsandbytes_4bit", "bitsandbytes_8bit")
"""transformers' names of its quantizers for one method."""


def is_on_host() -> bool:
    """Whether there is no accelerator but foo, so that models run on the CPU or on foo."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is None or accelerator.type == "foo"


def quantizer_of(
    own: type[HfQuantizer], has_other: Callable[[Any], bool], config: Any, **keywords: Any
) -> HfQuantizer:
    """Make ours without a GPU, unless transformers' own has to do it and has the package to."""
    is_dense = getattr(config, "dequantize", False) or not keywords.get("pre_quantized", True)
    if is_on_host() and not is_dense and not has_other(config):
        return FooQuantizer(config, **keywords)
    return own(config, **keywords)


def has_gptqmodel(config: Any) -> bool:
    return bool(is_gptqmodel_available())


def needs_compressed_tensors(config: Any) -> bool:
    return bool(is_compressed_tensors_available()) and not is_read(config)


def has_bitsandbytes(config: Any) -> bool:
    return bool(is_bitsandbytes_available())


def needs_torchao(config: Any) -> bool:
    return not isinstance(config, StoredTorchAo)


class TorchAoReader:
    """Makes the configuration of torchao's files, by transformers' class if torchao reads them."""

    @staticmethod
    def from_dict(settings: dict[str, Any], **keywords: Any) -> Any:
        is_ours = is_on_host() and StoredTorchAo.is_for(settings)
        return (StoredTorchAo if is_ours else TorchAoConfig).from_dict(settings, **keywords)


def has_other_numbers(config: Any) -> bool:
    """Whether an FP8 checkpoint has numbers of 4 bits, or embeddings in FP8."""
    return config.expert_dtype != "fp8" or bool(config.modules_to_convert)


def register_checkpoints() -> None:
    """Let transformers load quantised linear layers by foo's operators."""
    mapping: dict[str, Any] = AUTO_QUANTIZER_MAPPING
    others = {
        Awq.method: has_gptqmodel,
        Gptq.method: has_gptqmodel,
        CompressedTensors.method: needs_compressed_tensors,
        Fp8.method: has_other_numbers,
        **dict.fromkeys(BITSANDBYTES, has_bitsandbytes),
        TorchAo.method: needs_torchao,
    }
    for method, has_other in others.items():
        mapping[method] = partial(quantizer_of, mapping[method], has_other)
    # transformers reads these tensors, and not their names in a file's header.
    str_to_torch_dtype.setdefault("F8_E8M0", torch.float8_e8m0fnu)
    configs: dict[str, Any] = AUTO_QUANTIZATION_CONFIG_MAPPING
    configs[CompressedTensors.method] = ConfigReader
    configs[TorchAo.method] = TorchAoReader
