"""Write checkpoints with linear layers of 4 and 8 bits, by the definitions of their formats."""

import json

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from foo_ops.integrations.transformers.packed import FooPackedLinear

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def int32(words):
    """Return numbers below 2 ** 32 as the int32 of the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def packed(numbers, dim, bits=4, order=None):
    """Pack numbers of some bits along a dimension, the first one lowest, in the given order."""
    count = 32 // bits
    words = 0
    for place, which in enumerate(order or range(count)):
        index = torch.arange(which, numbers.shape[dim], count)
        words = words | numbers.long().index_select(dim, index) << bits * place
    return int32(words)


def spread(per_group, columns):
    """Repeat (N, G) for all columns of a group."""
    return per_group.repeat_interleave(columns // per_group.shape[1], 1)


def random_layer(rows, columns, group_size, bits=4):
    """Return integers (N, K), scales and zeros (N, G)."""
    groups = 1 if group_size == -1 else columns // group_size
    integers = torch.randint(2**bits, (rows, columns))
    scale = ((torch.rand(rows, groups) * 0.06 + 0.02) * 16 / 2**bits).half()
    return integers, scale, torch.randint(2**bits, (rows, groups))


def awq(rows, columns, group_size=128):
    """Return AWQ's tensors of a random layer, and its weight in float64."""
    integers, scale, zero = random_layer(rows, columns, group_size)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": packed(integers.t(), 1, order=order),
        "qzeros": packed(zero.t(), 1, order=order),
        "scales": scale.t().contiguous(),
    }
    weight = (integers - spread(zero, columns)).double() * spread(scale, columns).double()
    return tensors, weight


def gptq(rows, columns, group_size=128, bits=4, offset=1, is_symmetric=False, has_order=False):
    """Return GPTQ's tensors; ``offset`` is 1 in format v1, and 0 in v2."""
    integers, scale, zero = random_layer(rows, columns, group_size, bits)
    if is_symmetric:
        zero = torch.full_like(zero, 2 ** (bits - 1))
    group_of = torch.arange(columns) // (columns if group_size == -1 else group_size)
    if has_order:
        group_of = group_of[torch.randperm(columns)]
    tensors = {
        "qweight": packed(integers.t(), 0, bits),
        "qzeros": packed((zero - offset).t() % 2**bits, 1, bits),
        "scales": scale.t().contiguous(),
        "g_idx": group_of.to(torch.int32),
    }
    return tensors, (integers - zero[:, group_of]).double() * scale[:, group_of].double()


def pack_quantized(rows, columns, group_size=128, bits=4, is_symmetric=True, has_order=False):
    """Return the tensors of compressed-tensors' pack-quantized; -1 is its strategy "channel".

    ``has_order``: with act-order, as its older versions wrote.
    """
    integers, scale, zero = random_layer(rows, columns, group_size, bits)
    middle = 2 ** (bits - 1)
    if is_symmetric:
        zero = torch.full_like(zero, middle)
    # Integers and zeros are signed; 8 is added where they are packed.
    integers, zero = integers - middle, zero - middle
    tensors = {
        "weight_packed": packed(integers + middle, 1, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not is_symmetric:
        missing = torch.full((-rows % 8, zero.shape[1]), -middle)
        tensors["weight_zero_point"] = packed(torch.cat((zero, missing)) + middle, 0, bits)
    group_of = torch.arange(columns) // (columns if group_size == -1 else group_size)
    if has_order:
        group_of = group_of[torch.randperm(columns)]
        tensors["weight_g_idx"] = group_of.to(torch.int32)
    return tensors, (integers - zero[:, group_of]) * scale[:, group_of].double()


def int_quantized(rows, columns):
    """Return the tensors of compressed-tensors' int-quantized, 8 bits and strategy "channel"."""
    integers, scale, _ = random_layer(rows, columns, -1, 8)
    integers = integers - 128
    tensors = {"weight": integers.to(torch.int8), "weight_scale": scale}
    return tensors, integers * scale.double()


def float8(rows, columns, scale):
    """Return random codes of float8_e4m3fn without NaN, and their numbers times a scale (N, K)."""
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8)
    codes = torch.where(codes % 128 == 127, 0, codes).to(torch.uint8)
    weight = codes.view(torch.float8_e4m3fn)
    return weight, weight.double() * scale.double()


def fp8(rows, columns, block=(128, 128), exponents=None):
    """Return the tensors of FP8 with blocks; None is one scale in all.

    ``exponents``: the dtype of scales that are powers of two.
    """
    height, width = block or (rows, columns)
    sizes = (-(-rows // height), -(-columns // width))
    scale = torch.rand(sizes) * 0.0005 + 0.0005
    if exponents is not None:
        codes = torch.randint(127 - 12, 127 - 9, sizes, dtype=torch.uint8)
        scale = 2.0 ** (codes.double() - 127)
    of_all = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
    weight, exact = float8(rows, columns, of_all[:rows, :columns])
    if exponents is not None:
        scale = codes.view(exponents)
    return {"weight": weight, "weight_scale_inv": scale if block else scale[0, 0]}, exact


def float_quantized(rows, columns, has_rows=True):
    """Return the tensors of compressed-tensors' float-quantized, strategy "channel" or "tensor"."""
    scale = (torch.rand(rows if has_rows else 1, 1) * 0.0005 + 0.0005).half()
    weight, exact = float8(rows, columns, scale)
    return {"weight": weight, "weight_scale": scale if has_rows else scale[0]}, exact


def torchao_pairs(rows, columns, group_size=32):
    """Return the tensors of torchao's Int4Tensor: signed integers, the first of a byte lowest."""
    groups = columns // group_size
    integers = torch.randint(-8, 8, (rows, columns))
    scale, zero = (torch.rand(rows, groups) * 0.06 + 0.02).half(), torch.randn(rows, groups).half()
    zero = zero * scale * 4
    unsigned = integers % 16
    tensors = {
        "_weight_qdata": (unsigned[:, ::2] + 16 * unsigned[:, 1::2])
        .to(torch.uint8)
        .view(torch.int8),
        "_weight_scale": scale.t().contiguous(),
        "_weight_zero_point": zero.t().contiguous(),
    }
    value = integers * spread(scale, columns).double() + spread(zero, columns).double()
    return tensors, value


def torchao_bytes(rows, columns, group_size=None, bits=8, has_zeros=False):
    """Return the tensors of torchao's Int8Tensor, or with zeros of IntxUnpackedToInt8Tensor."""
    groups, half = 1 if group_size is None else columns // group_size, 2 ** (bits - 1)
    integers = torch.randint(-half, half, (rows, columns))
    scale = ((torch.rand(rows, groups) * 0.06 + 0.02) * 16 / 2**bits).half()
    zero = torch.randint(-half, half, (rows, groups)) * has_zeros
    tensors = {"_weight_qdata": integers.to(torch.int8), "_weight_scale": scale}
    if has_zeros or group_size is not None:
        tensors["_weight_zero_point"] = zero.to(torch.int8)
    return tensors, (integers - spread(zero, columns)) * spread(scale, columns).double()


def torchao_floats(rows, columns, has_rows=True):
    """Return the tensors of torchao's Float8Tensor, with a scale for each row or in all."""
    numbers = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(rows if has_rows else 1, 1) * 0.2 + 0.1
    return {"_weight_qdata": numbers, "_weight_scale": scale}, numbers.double() * scale.double()


def write_checkpoint(folder, make_layer, described, config=None, **sizes):
    """Write a model, by default a Llama, whose linear layers ``make_layer(rows, columns)`` makes.

    Returns:
        The model in float64 that the folder stands for, and the tensors of the file.
    """
    torch.manual_seed(0)
    kept = described.get("ignore", ["lm_head"])
    config = config or LlamaConfig(**(SIZES | sizes))
    exact = AutoModelForCausalLM.from_config(config).double().eval()
    tensors = {}

    def weight_of(name, rows, columns):
        stored, weight = make_layer(rows, columns)
        tensors.update({f"{name}.{last}": it for last, it in stored.items()})
        return weight

    for name, module in exact.named_modules():
        if isinstance(module, nn.Linear) and name not in kept:
            module.weight.data = weight_of(name, *module.weight.shape)
        elif hasattr(module, "gate_up_proj"):
            write_experts(module, name, weight_of, config)
        elif getattr(module, "weight", None) is not None:
            nn.init.normal_(module.weight, std=0.2)
            weight = module.weight.detach().half()
            tensors[f"{in_file(name, config)}.weight"] = weight
            module.weight.data = weight.double()
    write_folder(folder, config, tensors, described)
    return exact, tensors


def in_file(name, config):
    """Return the name of a module in files, where Mixtral's mixtures have another one."""
    return name.replace(".mlp", ".block_sparse_moe") if config.model_type == "mixtral" else name


def write_experts(module, name, weight_of, config):
    """Write each expert's layers, which a model fuses when it is loaded."""
    name, gate, up, down = in_file(name, config), "gate_proj", "up_proj", "down_proj"
    if config.model_type == "mixtral":
        gate, up, down = "w1", "w3", "w2"
    experts, both, columns = module.gate_up_proj.shape
    for expert in range(experts):
        parts = [weight_of(f"{name}.{expert}.{it}", both // 2, columns) for it in (gate, up)]
        module.gate_up_proj.data[expert] = torch.cat(parts)
        module.down_proj.data[expert] = weight_of(f"{name}.{expert}.{down}", columns, both // 2)


def write_large(folder, described, shapes, **sizes):
    """Write a Llama quickly, with random bits for the integers of its linear layers.

    Args:
        shapes: takes rows and columns, and returns the shapes of a layer's tensors.
    """
    config = LlamaConfig(**(SIZES | sizes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            for last, shape in shapes(*module.weight.shape).items():
                random = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
                tensors[f"{name}.{last}"] = random if "scale" not in last else torch.rand(shape)
        elif getattr(module, "weight", None) is not None:
            tensors[f"{name}.weight"] = torch.rand(module.weight.shape).half()
    write_folder(folder, config, tensors, described)


def write_folder(folder, config, tensors, described):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = config.to_dict() | {
        "dtype": "float16",
        "quantization_config": described,
    }
    (folder / "config.json").write_text(json.dumps(described))


# ---------------------------------------------------------------------------- models of checkpoints


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def tokens(count=9):
    return torch.randint(50, (2, count), generator=torch.Generator().manual_seed(0))


def logits_of(model, count=9):
    device = model.lm_head.weight.device
    with torch.no_grad():
        return model(tokens(count).to(device)).logits


def packed_layers(model):
    return {name: it for name, it in model.named_modules() if isinstance(it, FooPackedLinear)}


# ------------------------------------------------------------------------------------- bitsandbytes

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Dettmers et al. 2023, "QLoRA", appendix E."""
_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4 = (*_MAGNITUDES, *(-it for it in _MAGNITUDES))
TABLES = {"nf4": NF4, "fp4": FP4}


def in_4_bits(rows, columns, kind="nf4", block=64, is_nested=False, storage=torch.uint8):
    """Return the tensors of bitsandbytes' 4 bits, whose blocks run over all rows."""
    codes, table = torch.randint(16, (rows * columns,)), torch.tensor(TABLES[kind])
    blocks = rows * columns // block
    absmax = torch.rand(blocks) * 0.3 + 0.1
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    tensors = {}
    if is_nested:
        numbers = torch.linspace(-1, 1, 256)
        absmax = torch.randint(256, (blocks,), dtype=torch.uint8)
        factors = torch.rand(-(-blocks // 256)) * 0.1 + 0.05
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors |= {"weight.nested_absmax": factors, "weight.nested_quant_map": numbers}
        places = torch.arange(blocks) // 256
        of_blocks = numbers[absmax.long()].double() * factors[places].double() + 0.25
    else:
        of_blocks = absmax.double()
    pairs = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {
        "weight": pairs.view(storage).unsqueeze(1),
        "weight.absmax": absmax,
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": text,
    }
    weight = table[codes].double() * of_blocks[torch.arange(rows * columns) // block]
    return tensors, weight.reshape(rows, columns)


def in_8_bits(rows, columns):
    """Return the tensors of bitsandbytes' 8 bits: 127 stands for a row's largest magnitude."""
    integers, largest = torch.randint(-127, 128, (rows, columns)), torch.rand(rows) * 0.3 + 0.1
    tensors = {"weight": integers.to(torch.int8), "SCB": largest}
    tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return tensors, integers * largest.double().unsqueeze(1) / 127
