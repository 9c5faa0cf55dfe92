"""Views share memory; resize_ and set_ change a tensor in place."""

import pytest
import torch

VIEWS = {
    "view": lambda t: t.view(6, 4),
    "reshape": lambda t: t.reshape(3, 8),
    "reshape_alias": lambda t: t.mT.reshape(2, 4, 3, 1),
    "as_strided": lambda t: t.as_strided((2, 2), (3, 1), 1),
    "slice": lambda t: t[:, 1::2],
    "select": lambda t: t[1],
    "transpose": lambda t: t.transpose(0, 2),
    "permute": lambda t: t.permute(2, 0, 1),
    "expand": lambda t: t[None].expand(3, 2, 3, 4),
    "squeeze": lambda t: t[:1].squeeze(0),
    "unsqueeze": lambda t: t.unsqueeze(-1),
    "unfold": lambda t: t.unfold(2, 2, 1),
    "diagonal": lambda t: t.diagonal(0, 1, 2),
    "movedim": lambda t: t.movedim(0, -1),
    "detach": lambda t: t.detach(),
    "view_dtype": lambda t: t.view(torch.int32),
    "narrower_dtype": lambda t: t.view(torch.float16),
    "real": lambda t: torch.view_as_complex(t.view(2, 3, 2, 2)).real,
    "view_as_complex": lambda t: torch.view_as_complex(t.view(2, 3, 2, 2)),
    "view_as_real": lambda t: torch.view_as_real(torch.view_as_complex(t.view(2, 3, 2, 2))),
    "lists": lambda t: t.split(2, 2)[1],
    "unbind": lambda t: t.unbind(1)[2],
    "chunk": lambda t: t.chunk(2, 0)[1],
    "alias": lambda t: torch.ops.aten.alias(t),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    expected_base = torch.arange(24.0).reshape(2, 3, 4)
    base = expected_base.to("foo:1")
    torch.foo.reset_operator_counts()
    expected, view = VIEWS[name](expected_base), VIEWS[name](base)
    # Metadata alone: no CPU kernel runs.
    assert not any(count.fallback for count in torch.foo.operator_counts().values())
    assert view.device == base.device
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert (view.stride(), view.storage_offset()) == (expected.stride(), expected.storage_offset())
    assert torch.equal(view.cpu(), expected)
    view.view(-1)[0].zero_() if view.is_contiguous() else view.zero_()
    expected.view(-1)[0].zero_() if expected.is_contiguous() else expected.zero_()
    assert torch.equal(base.cpu(), expected_base)


def test_invalid_view():
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        torch.ones(2, 3, device="foo").t().view(6)
    with pytest.raises(RuntimeError, match="out of bounds for storage of size"):
        torch.ones(2, device="foo").as_strided((100,), (1,))


def test_in_place_on_a_view_is_seen_by_autograd():
    base = torch.ones(4, device="foo", requires_grad=True)
    tensor = base * 1
    tensor[1:3].mul_(5)
    tensor.sum().backward()
    assert base.grad.tolist() == [1, 5, 5, 1]
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        base[1:].mul_(2)


def test_resize():
    tensor = torch.arange(6.0, device="foo:1").resize_(2, 3)
    held = [torch.foo.memory_allocated(index) for index in range(2)]
    tensor.resize_(4, 5)
    # 80 bytes in place of 24, each rounded up.
    assert [torch.foo.memory_allocated(index) for index in range(2)] == [held[0], held[1] + 64]
    assert tensor.shape == (4, 5)
    assert tensor.device == torch.device("foo:1")
    assert tensor.untyped_storage().nbytes() == 80
    assert tensor.view(-1)[:6].tolist() == [0, 1, 2, 3, 4, 5]
    tensor.resize_(2)
    assert tensor.tolist() == [0, 1]
    tensor.resize_(1, 2, 3, 4, memory_format=torch.channels_last)
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert tensor.resize_as_(torch.ones(3, device="foo:1")).shape == (3,)


def test_set():
    source = torch.arange(6.0, device="foo:1")
    tensor = torch.empty(0, device="foo:1")
    tensor.set_(source)
    assert tensor.is_set_to(source)
    tensor.set_(source.untyped_storage(), 1, (2, 2), (2, 1))
    assert tensor.tolist() == [[1, 2], [3, 4]]
    tensor[0, 0] = 9
    assert source[1].item() == 9
    byte = torch.empty(0, dtype=torch.uint8, device="foo:1").set_(source.untyped_storage())
    assert byte.numel() == 24
    tensor.set_()
    assert tensor.shape == (0,)
    assert tensor.device == torch.device("foo:1")
    tensor.resize_(3).zero_()
    assert tensor.tolist() == [0, 0, 0]
    assert source[1].item() == 9


def test_set_beyond_the_end_of_a_storage():
    source = torch.arange(4.0, device="foo:1")
    tensor = torch.empty(0, device="foo:1")
    tensor.set_(source.untyped_storage(), 2, (6,), (1,))
    assert source.untyped_storage().nbytes() == 32
    assert tensor[:2].tolist() == [2, 3]
    assert source.tolist() == [0, 1, 2, 3]


def test_set_refuses_other_devices():
    message = 'storage of a tensor on device "foo:0" to a storage on different device "cpu"'
    with pytest.raises(RuntimeError, match=message):
        torch.empty(0, device="foo").set_(torch.ones(2).untyped_storage())


def test_data_and_swap():
    tensor = torch.ones(2, device="foo")
    tensor.data = torch.zeros(3, device="foo")
    assert tensor.tolist() == [0, 0, 0]
    other = torch.ones(1, device="foo:1")
    torch.utils.swap_tensors(tensor, other)
    assert tensor.device == torch.device("foo:1")


def test_zero_tensor():
    zero = torch._efficientzerotensor(3, device="foo:1")
    assert zero.device == torch.device("foo:1")
    assert zero._is_zerotensor()
    assert (zero + 1).tolist() == [1, 1, 1]
    assert torch.zeros(3, device="foo:1").copy_(zero).tolist() == [0, 0, 0]
