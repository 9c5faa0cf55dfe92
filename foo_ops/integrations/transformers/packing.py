"""Models whose weights become integers of 4 or 8 bits for good, and their files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foo_ops.integrations.transformers.activation_aware import (
    Prompt,
    Scaling,
    find_scalings,
)
from foo_ops.integrations.transformers.checkpoints import FooQuantizer, Names
from foo_ops.integrations.transformers.compressed import described
from foo_ops.integrations.transformers.experts import (
    FooExperts,
    names_of_weights,
    weights_of,
)
from foo_ops.integrations.transformers.gguf import FooGgufQuantizer
from foo_ops.integrations.transformers.linear import FooLinear
from foo_ops.integrations.transformers.memory import Mappings, trim
from foo_ops.integrations.transformers.packed import FooPackedLinear, Integers
from foo_ops.integrations.transformers.packed_experts import (
    FooPackedExperts,
    Parts,
    can_be_packed,
    packed_layers,
)
from foo_ops.integrations.transformers.quantized import (
    FooQuantizedExperts,
    FooQuantizedLinear,
    group_size_of,
)
from foo_ops.integrations.transformers.replacement import has_numbers, is_replaced, put_back
from foo_ops.ops.linear_quantized import quantize_for_inputs, quantize_weight


def pack(
    model: nn.Module, bits: int, method: str = "nearest", prompts: Sequence[Prompt] = ()
) -> None:
    """Turn linear layers and experts of a model into packed ones, whose weights are freed.

    A weight that another module has too, such as that of a head that is tied to the embedding,
    stays: nothing would be freed. Experts, and layers that the prompts do not reach, are rounded to
    the nearest by "awq".
    """
    owners = Counter(
        id(it) for module in model.modules() for it in module._parameters.values() if it is not None
    )
    mappings, layers = Mappings(), []
    for module in model.modules():
        if is_replaced(module) and isinstance(module, (FooLinear, FooQuantizedLinear)):
            put_back(module)
        if FooLinear.recognises(module) and can_be_rounded(module, bits, owners):
            layers.append(module)
    scalings: dict[nn.Module, Scaling] = {}
    if method == "awq":
        scalings, method = find_scalings(model, layers, prompts), "nearest"
    for layer in layers:
        pack_layer(layer, bits, method, mappings, scalings.pop(layer, None))
    for part in list(model.modules()):
        if isinstance(part, PreTrainedModel):
            pack_experts(part, bits, method, mappings)
            use_quantizer(part)
    trim()


def can_be_rounded(layer: Any, bits: int, owners: Mapping[int, int]) -> bool:
    weight = layer.weight
    has_groups = bits == 8 or group_size_of(weight) is not None
    return owners[id(weight)] == 1 and has_numbers(weight) and has_groups


def pack_layer(
    layer: Any, bits: int, method: str, mappings: Mappings, scaling: Scaling | None
) -> None:
    weight: Any = layer.weight
    size: Any = group_size_of(weight) if bits == 4 else None
    with torch.inference_mode(False), torch.no_grad():
        if scaling is None:
            integers = quantize_weight(weight, bits, size, method=method)
        else:
            divided = scaling.divided(weight.detach())
            integers = quantize_for_inputs(divided, size, scaling.inputs, scaling.columns)
            if layer.bias is not None:
                bias = scaling.divided(layer.bias.detach())
                layer.bias = nn.Parameter(bias, layer.bias.requires_grad)
    # The caller may hold the weight.
    mappings.release(weight, is_read_again=True)
    FooPackedLinear.take_over(layer, Integers(*integers))


def pack_experts(model: PreTrainedModel, bits: int, method: str, mappings: Mappings) -> None:
    """Pack the experts whose layers have names of their own in files."""
    names = Names(model)
    for path, module in list(model.named_modules()):
        if is_replaced(module) and isinstance(module, (FooExperts, FooQuantizedExperts)):
            put_back(module)
        if not can_be_packed(module):
            continue
        found = [names.parts_of(f"{path}.{it}") for it in names_of_weights(module)]
        parts = [it for it in found if it is not None]
        up, down, *_ = weights_of(module)
        weights = dict(zip(names_of_weights(module), (up, down)))
        sizes = {name: group_size_of(it) for name, it in weights.items()}
        if len(parts) < 2 or (bits == 4 and None in sizes.values()):
            continue
        if all(has_numbers(module.get_parameter(it)) for it in weights):
            packed = FooPackedExperts.of_layers(module, parts, reader(weights, parts, bits, method))
            model.set_submodule(path, packed.train(module.training))
            for it in weights.values():
                mappings.release(it, is_read_again=True)


def reader(
    weights: dict[str, Tensor], parts: list[Parts], bits: int, method: str
) -> Callable[[str], FooPackedLinear]:
    """Make a function that quantises one layer of one expert."""
    places = {
        layer: (weights[weight], place, len(layers))
        for weight, layers in parts
        for place, layer in enumerate(layers)
    }

    def read(name: str) -> FooPackedLinear:
        expert, _, layer = name.partition(".")
        weight, place, count = places[layer]
        rows = weight[int(expert)].chunk(count)[place]
        with torch.inference_mode(False), torch.no_grad():
            group_size = group_size_of(weight) if bits == 4 else None
            integers = Integers(*quantize_weight(rows, bits, group_size, method=method))
            return FooPackedLinear(integers)

    return read


def use_quantizer(model: Any) -> None:
    """Let transformers know that a model is quantised, as after loading its file.

    A model with layers that compressed-tensors does not have keeps the quantizer of its file.
    """
    if any(layer.table is not None for _, layer in packed_layers(model)):
        return
    config = described(model)
    if not config.settings["config_groups"]:
        return
    model.config.quantization_config = config
    model.hf_quantizer = FooQuantizer(config)
    model.is_quantized = True
    model.quantization_method = config.quant_method


def save_quantized(model: PreTrainedModel, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write a model with weights of 4 or 8 bits as compressed-tensors does.

    `from_pretrained` reads it back without rounding, as other programs do that know the formats
    ``pack-quantized``, ``int-quantized`` and ``float-quantized``.

    Args:
        model: after ``apply(model, quantize=4, keep_weights=False)``, or loaded from a checkpoint
            with weights of few bits.
        folder: as for ``model.save_pretrained``.
        options: others of ``model.save_pretrained``.

    Raises:
        ValueError: if no layer has weights of few bits, or if they are in act-order, from a GGUF
            file, or codes of a table (NF4, FP4), which compressed-tensors does not have.
    """
    layers = dict(packed_layers(model))
    if not layers:
        raise ValueError(
            "save_quantized: model must have weights of 4 or 8 bits, as after "
            "apply(model, quantize=4, keep_weights=False), got none"
        )
    if isinstance(model.hf_quantizer, FooGgufQuantizer):
        raise ValueError(
            "save_quantized: model must not be from a GGUF file, whose groups compressed-tensors "
            "does not have"
        )
    for name, layer in layers.items():
        if layer.order is not None:
            raise ValueError(
                f"save_quantized: the inputs of all layers must be in their own order, got "
                f"act-order in {name}; save_pretrained writes the format that was read"
            )
        if layer.table is not None:
            raise ValueError(
                f"save_quantized: no layer must have codes of a table, as of NF4 and FP4, got "
                f"them in {name}; save_pretrained writes the format that was read"
            )
    quantizer, config = model.hf_quantizer, model.config.quantization_config
    try:
        use_quantizer(model)
        model.save_pretrained(folder, **options)
    finally:
        model.hf_quantizer, model.config.quantization_config = quantizer, config
