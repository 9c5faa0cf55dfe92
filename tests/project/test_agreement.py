"""C++ and the kernels, written in Python, agree on all that both define."""

import dataclasses
import inspect

import pytest
import torch
from numba.core import types

import foo_ops.distributed
from foo_ops import _C
from foo_ops.kernels.attention import decode, operands, programs
from foo_ops.kernels.compiler import kernel, processor
from foo_ops.kernels.compiler.kernel import KERNELS
from foo_ops.kernels.experts import rows as experts
from foo_ops.kernels.flex import captured, emit
from foo_ops.kernels.lang import arguments
from foo_ops.kernels.lang import random as random_numbers
from foo_ops.kernels.lang.scratch import Struct
from foo_ops.kernels.linear import cross_entropy as cross_entropy
from foo_ops.kernels.linear import integer
from foo_ops.kernels.linear import product as linear
from foo_ops.kernels.products import on_amx, on_vectors
from foo_ops.kernels.simd import memory
from foo_ops.kernels.simd.types import ELEMENTS, Pointer
from foo_ops.kernels.user import elementwise, tile
from foo_ops.ops.attention.formula import AttentionOptions

DTYPES = ("float32", "float64", "bfloat16", "float16")
AXES = ("batch", "head", "row", "column")
# The operators of attention, and the options of packed ones that are no scores'.
KINDS = ("", "_seeded", "_backward")
LENGTHS = ("max_seqlen_q", "max_seqlen_k")


@dataclasses.dataclass(frozen=True)
class Field:
    name: str
    type: str
    offset: int


def described_by_cpp(name):
    """Return the fields of a C++ struct.

    An operand is its pointer and its strides; a product is its fields.
    """
    fields = []
    for field, type_, offset in _C.agreement()["structs"][name]:
        if type_ in ("Operand", "Product", "QuantizedProduct"):
            prefix = field if type_ == "Operand" else ""
            for part in described_by_cpp(type_):
                fields.append(Field(f"{prefix}{part.name}", part.type, offset + part.offset))
        elif type_ == "int64[4]":
            fields += [
                Field(f"_{axis}_stride", "int64", offset + 8 * i) for i, axis in enumerate(AXES)
            ]
        else:
            fields.append(Field("" if name == "Operand" else field, type_, offset))
    return fields


def named(type_):
    """Return a Numba type by its name in C++."""
    if isinstance(type_, Struct):
        return f"{type_.name.rpartition('_')[0].removeprefix('Attention')}*"
    if isinstance(type_, Pointer):
        return f"{type_.dtype}*"
    if isinstance(type_, types.CPointer):
        return f"{type_.dtype}*"
    return str(type_)


def described_by_python(struct):
    """Return the fields as `foo_ops.kernels.lang.scratch` reads them: each has eight bytes."""
    return [
        Field(name, named(type_), 8 * position)
        for position, (name, type_) in enumerate(struct.fields.items())
    ]


def differences(of_cpp, of_python):
    """Return where two descriptions differ. In C++, any data pointer is a void pointer."""
    found = [
        (cpp, python)
        for cpp, python in zip(of_cpp, of_python)
        if (cpp.name, cpp.offset) != (python.name, python.offset)
        or not agree(cpp.type, python.type)
    ]
    return found if len(of_cpp) == len(of_python) else [*found, (len(of_cpp), len(of_python))]


def agree(of_cpp, of_python):
    return of_cpp == of_python or (of_cpp == "void*" and of_python.endswith("*"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters(dtype):
    struct, piece, *_ = operands.argument_types(dtype)
    assert differences(described_by_cpp("Parameters"), described_by_python(struct)) == []
    assert differences(described_by_cpp("Piece"), described_by_python(piece)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_products(dtype):
    product, block, *_ = linear.argument_types(dtype)
    assert differences(described_by_cpp("Product"), described_by_python(product)) == []
    assert differences(described_by_cpp("ProductBlock"), described_by_python(block)) == []
    quantized, *_ = linear.quantized_argument_types(dtype, "int8")
    assert differences(described_by_cpp("QuantizedProduct"), described_by_python(quantized)) == []
    rows, *_ = integer.rows_argument_types(dtype)
    assert differences(described_by_cpp("IntegerRows"), described_by_python(rows)) == []
    product, *_ = integer.integer_argument_types(dtype, "int8")
    assert differences(described_by_cpp("IntegerProduct"), described_by_python(product)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_cross_entropy(dtype):
    operands, *_ = cross_entropy.argument_types(dtype)
    assert differences(described_by_cpp("CrossEntropy"), described_by_python(operands)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_experts(dtype):
    gate, rows, *_ = experts.gate_argument_types(dtype)
    combine, *_ = experts.combine_argument_types(dtype)
    for struct in (gate, rows, combine):
        name = struct.name.rpartition("_")[0]
        assert differences(described_by_cpp(name), described_by_python(struct)) == []


def test_a_difference_would_be_noticed():
    ours = described_by_cpp("Parameters")
    swapped = [ours[1], ours[0], *ours[2:]]
    renamed = [dataclasses.replace(ours[0], name="scales"), *ours[1:]]
    retyped = [dataclasses.replace(ours[0], type="int64"), *ours[1:]]
    moved = [dataclasses.replace(ours[0], offset=8), *ours[1:]]
    for theirs in (swapped, renamed, retyped, moved, ours[:-1], [*ours, ours[-1]]):
        assert differences(ours, theirs) != []
    assert differences(ours, list(ours)) == []


def test_views():
    fields = ("DATA", "NDIM", "SIZES", "STRIDES", "SIZE", "ROWS", "OUTSIDE")
    expected = [(name.lower(), 8 * getattr(memory, name)) for name in fields]
    given = _C.agreement()["structs"]["View"]
    assert [(name, offset) for name, _, offset in given] == expected
    assert [type_ for _, type_, _ in given] == [
        "void*",
        "int64",
        "int64*",
        "int64*",
        "int64",
        "int64",
        "Outside*",
    ]


def test_lists_of_views():
    assert _C.agreement()["structs"]["ViewList"] == [
        ("first", "View*", 8 * arguments.FIRST),
        ("size", "int64", 8 * arguments.LENGTH),
    ]


def test_accesses_outside():
    fields = ("IS_FOUND", "VIEW", "KIND", "ROW", "COUNT", "PLACE", "INDICES")
    expected = [(name.lower(), 8 * getattr(memory, name)) for name in fields]
    given = _C.agreement()["structs"]["Outside"]
    assert [(name, offset) for name, _, offset in given] == expected
    assert [type_ for _, type_, _ in given] == [
        "int64",
        "View*",
        "int64",
        "int64",
        "int64",
        "int8*",
        f"int64[{memory.MOST_INDICES}]",
    ]


def test_programs():
    assert _C.agreement()["structs"]["ProgramArguments"] == [
        ("scale", "float64", 8 * emit.SCALE),
        ("numbers", "float64*", 8 * emit.NUMBERS),
        ("integers", "int64*", 8 * emit.INTEGERS),
        ("captured", "CapturedTensor*", 8 * emit.CAPTURED),
        ("outside", "int64*", 8 * emit.OUTSIDE),
    ]
    dimensions = f"int64[{captured.MOST_DIMENSIONS}]"
    assert _C.agreement()["structs"]["CapturedTensor"] == [
        ("data", "void*", 8 * captured.DATA),
        ("gradient", "void*", 8 * captured.GRADIENT),
        ("of_batch", "int64", 8 * captured.OF_BATCH),
        ("of_head", "int64", 8 * captured.OF_HEAD),
        ("of_chunk", "int64", 8 * captured.OF_CHUNK),
        ("sizes", dimensions, 8 * captured.SIZES),
        ("strides", dimensions, 8 * captured.STRIDES),
        ("gradient_strides", dimensions, 8 * captured.GRADIENT_STRIDES),
    ]
    assert 8 * captured.WORDS == 8 * captured.GRADIENT_STRIDES + 8 * captured.MOST_DIMENSIONS


def keywords_of(function):
    """Return the names of a function's keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return {it.name for it in parameters if it.kind is it.KEYWORD_ONLY}


def test_options_of_attention():
    """Schemas, public functions, the dataclass and the struct of C++ have the same options."""
    of_dataclass = {field.name for field in dataclasses.fields(AttentionOptions)}
    forms = [f"attention{form}{kind}" for form in ("", "_varlen") for kind in KINDS]
    operators = [getattr(torch.ops.foo, name).default for name in (*forms, "attention_int8_cache")]
    of_schemas = [
        {it.name for it in operator._schema.arguments if it.kwarg_only} for operator in operators
    ]
    of_cpp = _C.agreement()["attention_options"]
    assert len(of_cpp) == len(set(of_cpp))
    assert set(of_cpp) == set.union(*of_schemas)
    assert set(of_cpp) == of_dataclass | {*LENGTHS, "attn_bias_requires_grad"}
    # The operators that take a seed, and their gradients, have all.
    assert of_schemas[1] == of_dataclass == of_schemas[2] - {"attn_bias_requires_grad"}
    public = of_dataclass - {"part_offset"}
    assert public == of_schemas[0] == keywords_of(foo_ops.attention) - {"return_logsumexp"}
    packed = public - {"is_causal"} | {*LENGTHS}
    assert [packed] * 3 == of_schemas[3:6]
    assert packed == keywords_of(foo_ops.attention_varlen) - {"return_logsumexp"}
    assert of_schemas[6] == keywords_of(foo_ops.attention_int8_cache)
    own = {"group", "is_balanced", "return_logsumexp"}
    assert public - {"dropout_p"} == keywords_of(foo_ops.distributed.ring_attention) - own


def functions():
    for dtype in ("float32", "float64"):
        text = f"0 0\n\n{dtype} input score\noutput 0\n\n\n\n"
        yield "ProgramFunction", programs.make_program_kernel(dtype, text).argument_types
    yield "TurnFunction", operands.TURN_ARGUMENTS
    for name, source in KERNELS.items():
        if name.startswith("attention_"):
            function = "SumFunction" if name == "attention_sum_chunks" else "AttentionFunction"
            for dtype in ("float32", "float64") if name == "attention_dropout_mask" else DTYPES:
                yield function, source.build(dtype).argument_types
        elif name.startswith("cross_entropy_"):
            for dtype in DTYPES:
                yield "CrossEntropyFunction", source.build(dtype).argument_types
        elif name.startswith("experts_"):
            function = "CombineFunction" if name == "experts_combine" else "GateFunction"
            for dtype in DTYPES:
                yield function, source.build(dtype).argument_types
        elif name.startswith("integer_"):
            kind = name.removeprefix("integer_").partition(".")[0]
            function = {
                "rows": "IntegerRowsFunction",
                "product": "IntegerFunction",
                "few_rows": "QuantizedFunction",
            }[kind]
            for dtype in ("float16", "bfloat16", "float32"):
                yield function, source.build(dtype).argument_types
        elif name.startswith("linear_"):
            is_quantized = name.startswith(
                ("linear_int8", "linear_fp8", "linear_int4", "linear_mxfp4", "linear_table4")
            )
            function = "QuantizedFunction" if is_quantized else "ProductFunction"
            for dtype in DTYPES:
                yield function, source.build(dtype).argument_types
    yield "TileFunction", tile.ARGUMENT_TYPES
    # Numba gets addresses of data as numbers.
    data, *rest = elementwise.ARGUMENT_TYPES
    assert data == types.CPointer(types.intp)
    yield "ElementwiseFunction", (types.CPointer(data), *rest)


def test_arguments_of_kernels():
    of_cpp, compared = _C.agreement()["functions"], set()
    for name, of_python in functions():
        assert len(of_cpp[name]) == len(of_python)
        for cpp, python in zip(of_cpp[name], map(named, of_python)):
            # C++ names structs that Numba sees as words of 8 bytes.
            are_words = (cpp, python) in (("int8**", "int64**"), ("ProgramArguments*", "int64*"))
            assert agree(cpp, python) or are_words, (name, cpp, python)
        compared.add(name)
    assert compared == set(of_cpp)


# Compared with the values that depend on the processor.
LIMITS = ("kKeyMultiple", "kWidestVector", "kWidestPanel")


def test_constants():
    constants = _C.agreement()["constants"]
    assert {name: constants[name] for name in constants if name not in LIMITS} == {
        "kQueryBlock": operands.QUERY_BLOCK,
        "kTileStride": operands.TILE_STRIDE,
        "kKeyBlock": operands.KEY_BLOCK,
        "kFewQueries": decode.MOST_ROWS,
        "kRowMultiple": on_amx.TILE_MULTIPLE,
        "kLog2E": 1.0 / operands.LOG2,
        "kNone": operands.BIAS_NONE,
        "kBool": operands.BIAS_BOOL,
        "kOfQueryDtype": operands.BIAS_OF_QUERY_DTYPE,
        "kFloat32": operands.BIAS_FLOAT32,
        "kNotWanted": operands.GRADIENT_NONE,
        "kStored": operands.GRADIENT_STORED,
        "kAdded": operands.GRADIENT_ADDED,
        "kCountTiles": tile.COUNT_TILES,
        "kRunTiles": tile.RUN_TILES,
        "kFinishTiles": tile.FINISH_TILES,
        "kRefused": tile.REFUSED,
        "kAbsentCode": arguments.ABSENT,
        "kGivenCode": arguments.GIVEN,
        "kCheckedCode": kernel.CHECKED,
        "kElement": memory.OF_ELEMENT,
        "kRow": memory.OF_ROW,
        "kFlat": memory.OF_FLAT,
        "kInRow": memory.IN_ROW,
        "kShape": memory.OF_SHAPE,
        "kProduct": memory.OF_PRODUCT,
        "kList": memory.OF_LIST,
        "kMostIndices": memory.MOST_INDICES,
        "kHidden": programs.HIDDEN,
        "kMasked": programs.MASKED,
        "kSeen": programs.SEEN,
        "kMixed": programs.MIXED,
    }


@pytest.mark.parametrize("bits", ["128", "256", "512"])
def test_limits(monkeypatch, bits):
    monkeypatch.setenv("FOO_VECTOR_BITS", bits)
    constants, lanes = _C.agreement()["constants"], on_vectors.lanes_of("float32")
    assert constants["kWidestVector"] % lanes == 0
    # Random numbers are drawn for groups of keys.
    assert constants["kKeyMultiple"] % random_numbers.WORDS == 0
    panels = {operands.PANEL_ON_TILES}
    # Blocks are not merged with fewer registers.
    if processor.vector_registers() == 32:
        panels |= {vectors * lanes for _, vectors in on_vectors.shapes()}
    assert all(constants["kWidestPanel"] % panel == 0 for panel in panels)


@pytest.mark.parametrize(
    "name", sorted(ELEMENTS.keys() - {"mask", "bfloat16x2", "int16x2", "int8x4", "uint8x4"})
)
def test_elements_are_those_of_torch(name):
    assert ELEMENTS[name].size == getattr(torch, name).itemsize
