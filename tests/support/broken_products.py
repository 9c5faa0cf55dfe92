"""Operators that are each wrong in one way."""

import ctypes
import dataclasses
from collections.abc import Callable

import torch
from support.product_operator import (
    empty_product,
    product,
    product_backward,
)

from foo_ops import library


def without_last(a, b):
    result = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    result.view(-1)[:-1] = (a * b).view(-1)[:-1]
    return result


def added_to_fresh_memory(a, b):
    return torch.empty(a.shape, dtype=a.dtype, device=a.device).add_(a * b)


def ignoring_strides(a, b):
    first, second = (torch.as_strided(t, t.shape, (3, 1)) for t in (a, b))
    return first * second


def ignoring_offset(a, b):
    return product(*(torch.as_strided(t, t.shape, t.stride(), 0) for t in (a, b)))


def multiples_of_four(a, b):
    result = torch.zeros(a.shape, dtype=a.dtype, device=a.device)
    count = a.numel() // 4 * 4
    result.view(-1)[:count] = (a * b).view(-1)[:count]
    return result


def refusing_empty(a, b):
    if a.numel() == 0:
        raise ValueError("a must not be empty")
    return product(a, b)


def refusing_bfloat16(a, b):
    if a.dtype == torch.bfloat16:
        raise TypeError("a must be float32 or float64, got torch.bfloat16")
    return product(a, b)


def writing_b(a, b):
    result = product(a, b)
    b.zero_()
    return result


def writing_beside_a(a, b):
    if a.storage_offset() > 0:
        torch.as_strided(a, (1,), (1,), 0).fill_(5)
    return product(a, b)


def writing_byte(tensor, offset):
    """Write a zero byte ``offset`` bytes from the data's start; memory of foo is not guarded."""
    if tensor.device.type == "cpu" and tensor.numel() > 0:
        ctypes.memset(tensor.data_ptr() + offset, 0, 1)


def writing_beside_the_result(a, b):
    result = product(a, b)
    writing_byte(result, result.nbytes + 2)
    return result


def writing_before_the_result(a, b):
    result = product(a, b)
    writing_byte(result, -4)
    return result


def writing_beside_working_memory(a, b):
    copy = a.clone()
    writing_byte(copy, copy.nbytes)
    return product(copy, b)


BUFFERS = {}


def in_one_buffer(a, b):
    result = product(a, b)
    buffer = BUFFERS.setdefault((a.shape, a.dtype, a.device), torch.empty_like(result))
    return buffer.copy_(result)


def backward_of_constants(ctx, grad):
    a, b = ctx.saved_tensors
    return grad * b.detach(), grad * a.detach()


def rule_of_the_first(info, in_dims, a, b):
    return product(a[:1], b[:1]).expand_as(a), 0


def aliasing(a, b):
    return a.mul_(b)


def on_cpu(a, b):
    return product(a, b).cpu()


def wrong_backward(ctx, grad):
    a, b = ctx.saved_tensors
    return grad * b, grad * a * 2


def forgetful_backward(ctx, grad):
    return grad * ctx.saved_tensors[1], None


def raising_backward(ctx, grad):
    raise RuntimeError("no such formula")


def backward_of_dense_gradients(ctx, grad):
    dense = torch.as_strided(grad, grad.shape, (3, 1), 0)
    return product_backward(ctx, dense)


def backward_that_asks_who_needs_it(ctx, grad):
    grad_a, grad_b = product_backward(ctx, grad)
    return (grad_a, grad_b) if ctx.needs_input_grad[0] else (None, grad_b * 2)


def looking_at_data(a, b):
    return a.new_empty(a.shape) if a.sum().item() > 0 else b.new_empty(b.shape)


def specialised_on_a_size(a, b):
    # Guards on the symbolic size: the graph becomes valid for one size alone.
    return a.new_empty(int(a.shape[0]), 3)


def decided_by_a_size(a, b):
    if a.shape[0] != b.shape[0]:
        raise ValueError("b must have as many rows as a")
    return empty_product(a, b)


def fake_of_dense_input(a, b):
    if not a.is_contiguous():
        raise ValueError("only dense input")
    return empty_product(a, b)


@dataclasses.dataclass
class Broken:
    """A broken operator, the check that finds it, and the message.

    ``register`` takes the operator and registers its other broken parts.
    """

    check: str
    message: str
    make: Callable = product
    fake: Callable | None = empty_product
    backward: Callable | None = product_backward
    register: Callable | None = None


BROKEN = {
    "fake shape": Broken(
        "fake_kernel",
        r"the fake kernel gives output 0 the shape \(7, 4\), but the kernel \(7, 3\)",
        fake=lambda a, b: a.new_empty(a.shape[0], a.shape[1] + 1),
    ),
    "fake dtype": Broken(
        "fake_kernel",
        r"gives output 0 the dtype torch\.float32, but the kernel torch\.bfloat16",
        fake=lambda a, b: torch.empty(a.shape, device=a.device),
    ),
    "fake stride": Broken(
        "fake_kernel",
        r"gives output 0 the stride \(1, 7\), but the kernel \(3, 1\)",
        fake=lambda a, b: a.new_empty(a.shape[::-1]).t(),
    ),
    "fake stride of strided input": Broken(
        "fake_kernel_in_layouts",
        r"gives output 0 the stride \(1, 7\), but the kernel \(3, 1\)",
        fake=lambda a, b: torch.empty_like(a),
    ),
    "fake device": Broken(
        "fake_kernel",
        r"gives output 0 the device cpu, but the kernel foo:0",
        fake=lambda a, b: torch.empty(a.shape, dtype=a.dtype),
    ),
    "fake kernel raises": Broken(
        "fake_kernel",
        r"the fake kernel \(torch\.library\.register_fake\) raised ZeroDivisionError",
        fake=lambda a, b: 1 // 0,
    ),
    "no fake kernel": Broken(
        "fake_kernel", r"^the operator has no fake kernel: register one \(torch\.library", fake=None
    ),
    "fake kernel looks at data": Broken("compiled_graph", "torch.compile", fake=looking_at_data),
    "fake kernel looks at data, without gradients": Broken(
        "compiled_for_inference", "torch.compile", fake=looking_at_data
    ),
    "fake kernel of one size": Broken(
        "compiled_for_dynamic_shapes",
        "the graph compiled for size 9 does not serve size 6: the fake kernel",
        fake=specialised_on_a_size,
    ),
    "fake kernel decides by a size that depends on data": Broken(
        "compiled_for_counted_sizes",
        r"raised UserError: Could not guard on data-dependent expression Ne\(u\d, u\d\)",
        fake=decided_by_a_size,
    ),
    "fake kernel of one size, exported": Broken(
        "exported",
        r"torch\.export\.export\(strict=True\) with counted sizes raised",
        fake=specialised_on_a_size,
    ),
    "values": Broken(
        "values",
        r"output 0 is wrong in 2[01] of 21 elements; the worst, at \(\d, \d\), is \S+ instead of "
        r"\S+, where \S+ is allowed",
        make=lambda a, b: product(a, b) * 1.1,
    ),
    "an element not written": Broken(
        "values",
        r"wrong in 1 of 21 .* 1 of them are nan, which fills fresh memory during this check: ",
        make=without_last,
    ),
    "fresh memory read": Broken(
        "values", r"21 of them are nan, .* or reads fresh memory", make=added_to_fresh_memory
    ),
    "strides ignored": Broken(
        "layouts",
        "Contiguous tensors with the same numbers give the right result: the kernel or the formula "
        "does not follow the strides and the offset of reversed_dimensions",
        make=ignoring_strides,
    ),
    "strides of the gradient ignored": Broken(
        "layouts",
        "the gradient of a .* give the right result",
        backward=backward_of_dense_gradients,
    ),
    "offset ignored": Broken(
        "layouts", "strides and the offset of at_odd_offset", make=ignoring_offset
    ),
    "tail of a vector forgotten": Broken("values", "wrong in 1 of 21", make=multiples_of_four),
    "empty refused": Broken(
        "values",
        r"called with float32 \(0, 3\), float32 \(0, 3\) raised ValueError: a must not be empty",
        make=refusing_empty,
    ),
    "dtype refused": Broken(
        "values",
        "whose OpSpec promises bfloat16 on foo, called with .* raised TypeError: a must be float32",
        make=refusing_bfloat16,
    ),
    "device of an output": Broken(
        "values", "output 0 must be on foo as the inputs are, got cpu", make=on_cpu
    ),
    "argument written": Broken(
        "writes_only_what_is_declared",
        r"the operator writes its argument b, but its schema does not declare this: "
        r".*\(Tensor a, Tensor b\)",
        make=writing_b,
    ),
    "memory beside an argument written": Broken(
        "writes_only_what_is_declared",
        "the operator writes to the memory of its argument a outside of the tensor's elements",
        make=writing_beside_a,
    ),
    "memory beside the result written": Broken(
        "writes_only_what_is_declared",
        "the operator writes outside of output 0, an allocation of (84|42|168) bytes: the first "
        "byte written is 2 bytes after its end",
        make=writing_beside_the_result,
    ),
    "memory before the result written": Broken(
        "writes_only_what_is_declared",
        r"the operator writes outside of output 0, an allocation of \d+ bytes: the first byte "
        "written is 4 bytes before its start",
        make=writing_before_the_result,
    ),
    "memory beside working memory written": Broken(
        "writes_only_what_is_declared",
        r"the operator writes outside of temporary memory, an allocation of \d+ bytes: the first "
        "byte written is 0 bytes after its end",
        make=writing_beside_working_memory,
    ),
    "argument returned": Broken(
        "aliases_only_what_is_declared",
        "output 0 shares memory with its argument a, but the schema does not declare this",
        make=aliasing,
    ),
    "result of an earlier call": Broken(
        "aliases_only_what_is_declared",
        "output 0 shares memory with a result of an earlier call, but the schema does not declare "
        "this",
        make=in_one_buffer,
    ),
    "gradient of the gradient": Broken(
        "second_derivatives",
        r"the second derivative by tensor 0 is wrong in \d+ of 21 elements; the worst, at "
        r"\(\d, \d\), is \S+ instead of",
        backward=backward_of_constants,
    ),
    "tangent": Broken(
        "forward_mode",
        "the tangent of output 0 is wrong in 21 of 21 elements",
        backward=None,
        register=lambda operator: library.register_autograd(
            operator, composite=lambda a, b: a * b * b
        ),
    ),
    "rule of vmap": Broken(
        "mapped",
        "element 1 of the mapped dimension.*output 0 is wrong in",
        register=lambda operator: library.register_vmap(operator, rule_of_the_first),
    ),
    "gradient": Broken("gradients", "the gradient of b is wrong", backward=wrong_backward),
    "gradient, numerically": Broken(
        "gradcheck", "gradcheck raised .*Jacobian mismatch", backward=wrong_backward
    ),
    "gradient, compiled": Broken(
        "compiled_graph", "^sample 'size7': the gradient of b is wrong", backward=wrong_backward
    ),
    "gradient forgotten": Broken(
        "gradients", "the gradient of b is wrong", backward=forgetful_backward
    ),
    "gradient raises": Broken(
        "gradients",
        "the gradient formula raised RuntimeError: no such formula",
        backward=raising_backward,
    ),
    "gradient that nobody needs": Broken(
        "gradient_only_where_needed",
        "an output requires a gradient although no input does",
        make=lambda a, b: product(a, b).requires_grad_(),
    ),
    "index of a device": Broken(
        "second_device",
        "output 0 must be on foo:1 as the inputs are, got foo:0",
        make=lambda a, b: product(a, b).to("foo:0"),
    ),
    "fake kernel wants dense input": Broken(
        "compiled_for_layouts",
        "^layout reversed_dimensions: torch.compile.* raised .*only dense",
        fake=fake_of_dense_input,
    ),
    "gradient of one input alone": Broken(
        "gradient_of_each_input",
        "the gradient differs where b alone requires a gradient",
        backward=backward_that_asks_who_needs_it,
    ),
    "no formula": Broken(
        "gradients",
        r"the operator has no gradient formula: register one \(torch\.library\.register_autograd",
        backward=None,
    ),
    "opcheck": Broken("opcheck", "test_schema", make=writing_b),
}
