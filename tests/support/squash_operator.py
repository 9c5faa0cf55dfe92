"""A user's operator; a program that runs a package containing it imports this module too."""

from foo_ops import library

library.define("squash::squash", "(Tensor input, *, float by=2.0) -> Tensor")


@library.elementwise_kernel
def squash_backward(grad, input, by):
    return grad * by / (by + abs(input)) ** 2


@library.register_kernel("squash::squash", ("cpu", "foo"))
@library.elementwise_kernel(backward=squash_backward)
def squash(input, by):
    return input / (by + abs(input))
