"""The table of the package's kernels: the name that a launcher uses, and the maker.

Imports neither Numba nor LLVM. A module of kernels is imported when one of them is compiled.
"""

from __future__ import annotations

from foo_ops.kernels.compiler.kernel import KERNELS, Maker, OwnKernel

FORWARD = Maker("foo_ops.kernels.attention.forward", "make_forward_kernel")
DECODE = Maker("foo_ops.kernels.attention.decode", "make_decode_kernel")
MERGE = Maker("foo_ops.kernels.attention.forward", "make_merge_kernel")
BACKWARD = Maker("foo_ops.kernels.attention.backward", "make_backward_kernel")
PRODUCT = Maker("foo_ops.kernels.linear.product", "make_product_kernel")
FEW_ROWS = Maker("foo_ops.kernels.linear.few_rows", "make_few_rows_kernel")
FEW_ROWS_ON_UNIT = Maker("foo_ops.kernels.linear.few_rows", "make_few_rows_on_unit_kernel")
ADJACENT_COLUMNS = Maker("foo_ops.kernels.linear.few_rows", "make_adjacent_columns_kernel")
FEW_STEPS = Maker("foo_ops.kernels.linear.few_steps", "make_few_steps_kernel")
FINISH = Maker("foo_ops.kernels.linear.product", "make_finish_kernel")
QUANTIZED = "foo_ops.kernels.linear.quantized"
EIGHT_BIT_PRODUCT = Maker(QUANTIZED, "make_8bit_product_kernel")
EIGHT_BIT_FEW_ROWS = Maker(QUANTIZED, "make_8bit_few_rows_kernel")
INT4_PRODUCT = Maker(QUANTIZED, "make_int4_product_kernel")
INT4_FEW_ROWS = Maker(QUANTIZED, "make_int4_few_rows_kernel")
INTEGER = "foo_ops.kernels.linear.integer"
INTEGER_ROWS = Maker(INTEGER, "make_rows_kernel")
INTEGER_INT8_PRODUCT = Maker(INTEGER, "make_int8_product_kernel")
INTEGER_INT4_PRODUCT = Maker(INTEGER, "make_int4_product_kernel")
INTEGER_INT8_FEW_ROWS = Maker(INTEGER, "make_int8_few_rows_kernel")
INTEGER_INT4_FEW_ROWS = Maker(INTEGER, "make_int4_few_rows_kernel")
MXFP4_PRODUCT = Maker(QUANTIZED, "make_mxfp4_product_kernel")
MXFP4_FEW_ROWS = Maker(QUANTIZED, "make_mxfp4_few_rows_kernel")
TABLE4_PRODUCT = Maker(QUANTIZED, "make_table4_product_kernel")
TABLE4_FEW_ROWS = Maker(QUANTIZED, "make_table4_few_rows_kernel")
STATISTICS = Maker("foo_ops.kernels.linear.cross_entropy", "make_statistics_kernel")
LOSS = Maker("foo_ops.kernels.linear.cross_entropy", "make_loss_kernel")
LOSS_GRADIENT = Maker("foo_ops.kernels.linear.cross_entropy", "make_gradient_kernel")
EXPERTS = "foo_ops.kernels.experts.rows"
GATE = Maker(EXPERTS, "make_gate_kernel")
GATE_GRADIENT = Maker(EXPERTS, "make_gate_gradient_kernel")
COMBINE = Maker(EXPERTS, "make_combine_kernel")
PROGRAM = Maker("foo_ops.kernels.attention.programs", "make_program_kernel")
SUM_CHUNKS = Maker("foo_ops.kernels.attention.backward", "make_sum_chunks_kernel")
DROPOUT_MASK = Maker("foo_ops.kernels.attention.forward", "make_dropout_mask_kernel")

# A `.without_options` kernel has none of the options that most calls do without: bias, soft cap,
# ALiBi and dropout. It compiles in half the time.
_WITHOUT_OPTIONS = {"has_options": False}
_PROGRAMS = {"has_options": False, "has_programs": True}
# Epilogues: functions applied to the sums of linear layers.
_FINISHES = ("relu", "silu", "gelu", "gelu_tanh", "silu_mul")
# Weights of 8 bits, by the names of their operators.
_EIGHT_BITS = {"linear_int8": "int8", "linear_fp8": "float8_e4m3fn"}
_GROUP_SIZES = (32, 64, 128)
_ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh")
_OWN = (
    OwnKernel("attention_forward", FORWARD),
    OwnKernel("attention_forward.without_options", FORWARD, _WITHOUT_OPTIONS),
    OwnKernel("attention_forward.programs", FORWARD, _PROGRAMS),
    OwnKernel("attention_decode", DECODE),
    OwnKernel("attention_decode.without_options", DECODE, _WITHOUT_OPTIONS),
    OwnKernel("attention_decode.int8_cache", DECODE, {"cache_dtype": "int8"}),
    OwnKernel("attention_merge", MERGE),
    OwnKernel("attention_backward", BACKWARD),
    OwnKernel("attention_backward.without_options", BACKWARD, _WITHOUT_OPTIONS),
    OwnKernel("attention_backward.programs", BACKWARD, _PROGRAMS),
    OwnKernel("attention_sum_chunks", SUM_CHUNKS),
    OwnKernel("attention_dropout_mask", DROPOUT_MASK),
    OwnKernel("linear_product", PRODUCT),
    OwnKernel("linear_product.sums", PRODUCT, {"adds": True}),
    OwnKernel("linear_few_rows", FEW_ROWS),
    OwnKernel("linear_few_rows_on_unit", FEW_ROWS_ON_UNIT),
    OwnKernel("linear_few_rows_of_adjacent_columns", ADJACENT_COLUMNS),
    OwnKernel("linear_few_steps", FEW_STEPS),
    OwnKernel("linear_finish", FINISH),
    *(
        kernel
        for name, stored in _EIGHT_BITS.items()
        for kernel in (
            OwnKernel(f"{name}_product", EIGHT_BIT_PRODUCT, {"stored": stored}),
            OwnKernel(
                f"{name}_product.groups", EIGHT_BIT_PRODUCT, {"stored": stored, "has_groups": True}
            ),
            OwnKernel(f"{name}_few_rows", EIGHT_BIT_FEW_ROWS, {"stored": stored}),
            *(
                OwnKernel(
                    f"{name}_few_rows.{it}",
                    EIGHT_BIT_FEW_ROWS,
                    {"stored": stored, "group_size": it},
                )
                for it in _GROUP_SIZES
            ),
        )
    ),
    OwnKernel("linear_int4_product", INT4_PRODUCT),
    *(
        OwnKernel(f"linear_int4_few_rows.{it}", INT4_FEW_ROWS, {"group_size": it})
        for it in _GROUP_SIZES
    ),
    OwnKernel("integer_rows", INTEGER_ROWS),
    *(
        kernel
        for name, maker in (("int8", INTEGER_INT8_PRODUCT), ("int4", INTEGER_INT4_PRODUCT))
        for kernel in (
            OwnKernel(f"integer_product.{name}", maker),
            OwnKernel(f"integer_product.{name}.silu_mul", maker, {"finish": "silu_mul"}),
        )
    ),
    OwnKernel("integer_few_rows.int8", INTEGER_INT8_FEW_ROWS),
    *(
        OwnKernel(f"integer_few_rows.{name}.{it}", maker, {"group_size": it})
        for name, maker in (("int8", INTEGER_INT8_FEW_ROWS), ("int4", INTEGER_INT4_FEW_ROWS))
        for it in _GROUP_SIZES
    ),
    OwnKernel("linear_mxfp4_product", MXFP4_PRODUCT),
    OwnKernel("linear_mxfp4_few_rows", MXFP4_FEW_ROWS),
    OwnKernel("linear_table4_product", TABLE4_PRODUCT),
    *(
        OwnKernel(f"linear_table4_few_rows.{it}", TABLE4_FEW_ROWS, {"group_size": it})
        for it in _GROUP_SIZES
    ),
    OwnKernel("cross_entropy_statistics", STATISTICS),
    OwnKernel("cross_entropy_loss", LOSS),
    OwnKernel("cross_entropy_gradient", LOSS_GRADIENT),
    *(OwnKernel(f"linear_product.{it}", PRODUCT, {"finish": it}) for it in _FINISHES),
    *(OwnKernel(f"linear_few_rows.{it}", FEW_ROWS, {"finish": it}) for it in _FINISHES),
    *(
        OwnKernel(f"linear_few_rows_on_unit.{it}", FEW_ROWS_ON_UNIT, {"finish": it})
        for it in _FINISHES
    ),
    *(OwnKernel(f"linear_finish.{it}", FINISH, {"finish": it}) for it in _FINISHES),
    *(OwnKernel(f"experts_gate.{it}", GATE, {"activation": it}) for it in _ACTIVATIONS),
    *(
        OwnKernel(f"experts_gate_gradient.{it}", GATE_GRADIENT, {"activation": it})
        for it in _ACTIVATIONS
    ),
    OwnKernel("experts_combine", COMBINE),
)
KERNELS.update({kernel.name: kernel for kernel in _OWN})
KERNELS.families["attention_program"] = (PROGRAM, {})
KERNELS.families["attention_mask"] = (PROGRAM, {"counts": True})
