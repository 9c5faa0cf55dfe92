"""Every write increments the version of a foo tensor, so that autograd notices it."""

import pytest
import torch

LISTS = {
    "_foreach_mul_": lambda x, y: torch._foreach_mul_(x, 2),
    "_foreach_add_": lambda x, y: torch._foreach_add_(x, y, alpha=2),
    "_foreach_lerp_": lambda x, y: torch._foreach_lerp_(x, y, 0.5),
    "_foreach_sqrt_": lambda x, y: torch._foreach_sqrt_(x),
    "_foreach_zero_": lambda x, y: torch._foreach_zero_(x),
    "_foreach_copy_": lambda x, y: torch._foreach_copy_(x, y),
    "_foreach_addcmul_": lambda x, y: torch._foreach_addcmul_(x, y, y),
    "split_copy": lambda x, y: torch.split_copy(torch.cat(y), 3, out=x),
    "unbind_copy": lambda x, y: torch.unbind_copy(torch.stack(y), out=x),
    "_fused_sgd_": lambda x, y: torch._fused_sgd_(
        *(x, y, []),
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_tensors_count_their_versions(name):
    versions = {}
    for device in ("cpu", "foo"):
        written = [torch.ones(3, device=device) for _ in range(2)]
        read = [torch.full((3,), 2.0, device=device) for _ in range(2)]
        LISTS[name](written, read)
        versions[device] = [tensor._version for tensor in written + read]
    assert versions["foo"] == versions["cpu"]


def test_a_write_to_what_backward_needs_is_noticed():
    input = torch.ones(3, device="foo", requires_grad=True)
    output = input.exp()
    torch._foreach_mul_([output.detach()], 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_operator_that_writes_and_fails_leaves_what_the_cpu_leaves():
    shapes = {}
    for device in ("cpu", "foo"):
        x = torch.ones(4, device=device)
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            torch.cat([x, x], out=x)
        shapes[device] = x.shape
    assert shapes["foo"] == shapes["cpu"]
