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
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils import is_compressed_tensors_available, is_gptqmodel_available

from foo_ops.integrations.transformers.compressed import ConfigReader, described, is_read
from foo_ops.integrations.transformers.formats import (
    FORMATS,
    Awq,
    CompressedTensors,
    Format,
    Gptq,
    UnreadableError,
)
from foo_ops.integrations.transformers.memory import Mappings
from foo_ops.integrations.transformers.packed import FooPackedLinear

# ------------------------------------------------------------------------------------------- files


def tensors_in(files: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint on the meta device."""
    found = {}
    for file in files:
        found.update(load_state_dict(file, map_location="meta"))
    return found


def by_module(model: Any, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Sort tensors by the modules that they are loaded into, with the last parts of their names."""
    mapping = get_model_conversion_mapping(model)
    renamings = [it for it in mapping if isinstance(it, WeightRenaming)]
    own = model.state_dict()
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        # A quantised layer's tensors follow its weight, whose name the model knows.
        weight, _ = rename_source_key(
            f"{owner}.weight", renamings, [], model.base_model_prefix, own
        )
        found[weight.removesuffix(".weight")][last] = tensor
    return found


def sizes_of(model: nn.Module, name: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a model's linear layer."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise UnreadableError("the model has no such layer, but maybe fused ones") from None
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
        layer = FooPackedLinear(integers, self.bias, self.format)
        self._buffers.clear()
        kept = set(map(start_of, layer.buffers()))
        for tensor in stored.values():
            if start_of(tensor) not in kept:
                mappings.release(tensor)
        return layer.train(self.training)


def start_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FooQuantizer(HfQuantizer):
    """Loads linear layers as they are in the file, for CPUs and ``foo``."""

    @property
    def method(self) -> str:
        method = self.quantization_config.quant_method
        return str(getattr(method, "value", method))

    def _process_model_before_weight_loading(
        self, model: Any, dtype: Any = None, checkpoint_files: Any = None, **keywords: Any
    ) -> None:
        dtype = dtype or torch.get_default_dtype()
        kind = FORMATS[self.method]
        for name, stored in by_module(model, tensors_in(checkpoint_files)).items():
            if not kind.is_in(stored) or is_ignored(model, name):
                continue
            with self.reading(name):
                format = kind.find(stored, *sizes_of(model, name), self.quantization_config)
            model.set_submodule(name, StoredLinear(format, stored, dtype))

    def _process_model_after_weight_loading(self, model: Any, **keywords: Any) -> None:
        """Pack the layers, one after the other."""
        mappings = Mappings()
        with torch.inference_mode(False), torch.no_grad():
            for name, module in list(model.named_modules()):
                if isinstance(module, StoredLinear):
                    with self.reading(name):
                        model.set_submodule(name, module.packed(mappings))
        if self.method == CompressedTensors.method:
            model.config.quantization_config = described(model)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Name the format and the layer in errors."""
        try:
            yield
        except UnreadableError as error:
            raise NotImplementedError(
                f"{self.method}: foo_ops cannot read the weights of {name}: {error}"
            ) from None

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of a file."""
        tensors = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, FooPackedLinear):
                for last in module._buffers:
                    tensors.pop(f"{name}.{last}", None)
                written = module.stored_format.write(module)
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


def register_checkpoints() -> None:
    """Let transformers load quantised linear layers by foo's operators."""
    mapping: dict[str, Any] = AUTO_QUANTIZER_MAPPING
    others = {
        Awq.method: has_gptqmodel,
        Gptq.method: has_gptqmodel,
        CompressedTensors.method: needs_compressed_tensors,
    }
    for method, has_other in others.items():
        mapping[method] = partial(quantizer_of, mapping[method], has_other)
    configs: dict[str, Any] = AUTO_QUANTIZATION_CONFIG_MAPPING
    configs[CompressedTensors.method] = ConfigReader
