"""Operators, views and writes for random sequences on foo."""

import copy
import io

import torch

import foo_ops

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)


def saved_and_loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    # On the CPU a storage from a file cannot be resized, so it is not kept.
    return torch.load(io.BytesIO(file.getvalue())).clone()


def gradient(function):
    """Return a function that gives ``function``'s value and the gradients of its sum of squares."""

    def call(*tensors):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        result = function(*inputs)
        return result.detach(), *torch.autograd.grad(result.square().sum(), inputs)

    return call


def other_device_and_back(tensor):
    if tensor.device.type == "cpu":
        return tensor.clone()
    return tensor.to("foo:1").to("foo:0")


def through_the_host(tensor):
    return tensor.cpu().clone().to(tensor.device)


def on_a_stream(tensor):
    if tensor.device.type == "cpu":
        return tensor + tensor
    stream = torch.foo.Stream()
    stream.wait_stream(torch.foo.current_stream())
    with torch.foo.stream(stream):
        result = tensor + tensor
        result.record_stream(stream)
        event = torch.foo.Event()
        event.record()
    event.synchronize()
    return result


# By name, so that a failing sequence prints which function it calls.
UNARY = {
    "abs": torch.abs,
    "foo abs": foo_ops.abs,
    "neg": torch.neg,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(0, keepdim=True),
    "amax": lambda x: x.amax(-1),
    "argmax": torch.argmax,
    "sort": lambda x: x.sort(stable=True),
    "topk": lambda x: x.topk(1),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1),
    "nonzero": torch.nonzero,
    "unique": torch.unique,
    "tril": torch.tril,
    "clone": torch.clone,
    "clone as contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x: x.contiguous(),
    "lazy clone": torch._lazy_clone,
    "reshape": lambda x: x.reshape(-1),
    "zeros like": torch.zeros_like,
    "full like": lambda x: torch.full_like(x, 3),
    "new ones": lambda x: x.new_ones(2, 3),
    "logical not": torch.logical_not,
    "bitwise not": torch.bitwise_not,
    "isnan": torch.isnan,
    "to float64": lambda x: x.double(),
    "to float32": lambda x: x.float(),
    "to bfloat16": lambda x: x.bfloat16(),
    "to int64": lambda x: x.nan_to_num(0, 1, -1).long(),
    "to bool": lambda x: x.bool(),
    "unbind": lambda x: x.unbind(),
    "chunk": lambda x: x.chunk(2, -1),
    "deepcopy": copy.deepcopy,
    "saved and loaded": saved_and_loaded,
    "other device and back": other_device_and_back,
    "through the host": through_the_host,
    "on a stream": on_a_stream,
    "gradient of tanh": gradient(torch.tanh),
    "gradient of rms norm": gradient(foo_ops.rms_norm),
    "gradient of softmax": gradient(lambda x: x.softmax(-1)),
    "foo rms norm": foo_ops.rms_norm,
}

BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "eq": torch.eq,
    "lt": torch.lt,
    "where": lambda x, y: torch.where(x > y, x, y),
    "matmul": torch.matmul,
    "outer": lambda x, y: torch.outer(x[:30], y[:30]),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y], -1),
    "foreach": lambda x, y: torch._foreach_add([x, y], [y, x]),
    "index": lambda x, y: x[y.long().abs() % max(1, len(x))],
    "masked select": lambda x, y: x.masked_select(y > 0),
    "gather": lambda x, y: x.gather(-1, y.long().abs() % max(1, x.shape[-1])),
    "equal": lambda x, y: torch.tensor(torch.equal(x, y), device=x.device),
    "to dtype of": lambda x, y: x.to(y.dtype),
    "foo silu mul": foo_ops.silu_mul,
    "gradient of mul": gradient(torch.mul),
    "gradient of silu mul": gradient(foo_ops.silu_mul),
}

VIEWS = {
    "transpose": lambda x, i: x.transpose(i % 4, -1),
    "t": lambda x, i: x.t(),
    "select": lambda x, i: x.select(i % 3, i),
    "slice": lambda x, i: x[i:],
    "step": lambda x, i: x[..., :: i + 1],
    "narrow": lambda x, i: x.narrow(-1, i, 1),
    "unsqueeze": lambda x, i: x.unsqueeze(i % 3),
    "squeeze": lambda x, i: x.squeeze(),
    "expand": lambda x, i: x.expand(i % 4, *x.shape),
    "unfold": lambda x, i: x.unfold(-1, i % 4, 1),
    "diagonal": lambda x, i: x.diagonal(i % 3),
    "view": lambda x, i: x.view(-1, i % 4 + 1),
    "view as int32": lambda x, i: x.view(torch.int32),
    "view as uint8": lambda x, i: x.view(torch.uint8),
    "view as real": lambda x, i: torch.view_as_real(x),
    "view as complex": lambda x, i: torch.view_as_complex(x),
    "conj": lambda x, i: x.conj(),
    "imag": lambda x, i: x.imag,
    "negative view": lambda x, i: x.conj().imag,
    "detach": lambda x, i: x.detach(),
    "split": lambda x, i: x.split(i % 4 + 1),
    "as strided": lambda x, i: x.as_strided((min(2, i), 1), (1, 1), min(i, x.storage_offset())),
}

IN_PLACE = {
    "zero_": lambda x, i: x.zero_(),
    "fill_": lambda x, i: x.fill_(i),
    "add_": lambda x, i: x.add_(i),
    "mul_": lambda x, i: x.mul_(-1.5),
    "abs_": lambda x, i: x.abs_(),
    "foo abs_": lambda x, i: torch.ops.foo.abs_(x),
    "sqrt_": lambda x, i: x.sqrt_(),
    "clamp_": lambda x, i: x.clamp_(-i, i),
    "cumsum_": lambda x, i: x.cumsum_(0),
    "index_fill_": lambda x, i: x.index_fill_(0, torch.tensor([i], device=x.device), 7),
    "set item": lambda x, i: x.__setitem__(i, 5),
    "random_": lambda x, i: x.random_(0, 100),
    "t_": lambda x, i: x.t_(),
    "transpose_": lambda x, i: x.transpose_(0, -1),
    "squeeze_": lambda x, i: x.squeeze_(),
    "unsqueeze_": lambda x, i: x.unsqueeze_(i % 3),
    "conj_physical_": lambda x, i: x.conj_physical_(),
    "set_ to nothing": lambda x, i: x.set_(),
}

IN_PLACE_OF_TWO = {
    "copy_": lambda x, y: x.copy_(y),
    "copy_ without waiting": lambda x, y: x.copy_(y, non_blocking=True),
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 3),
    "index_put_": lambda x, y: x.index_put_((y.long().abs() % max(1, len(x)),), x.sum()),
    "set item": lambda x, y: x.__setitem__(slice(None), y),
    "set_": lambda x, y: x.set_(y),
    # An expanded tensor has a smaller storage, which would grow by uninitialised memory.
    "set_ to storage": lambda x, y: x.set_(
        y.untyped_storage(),
        0,
        (min(y.numel() * y.itemsize, y.untyped_storage().nbytes()) // x.itemsize,),
    ),
    "data": lambda x, y: setattr(x, "data", y),
    "swap": torch.utils.swap_tensors,
    "foreach": lambda x, y: torch._foreach_mul_([x, y], 2),
}

# The last tensor is `out`.
OUT = {
    "abs": lambda x, out: torch.abs(x, out=out),
    "foo abs": lambda x, out: torch.ops.foo.abs.out(x, out=out),
    "add": lambda x, out: torch.add(x, x, out=out),
    "sum": lambda x, out: torch.sum(x, -1, out=out),
    "cat": lambda x, out: torch.cat([x, x], out=out),
    # Not matmul: when a composite resizes `out`, devices other than the CPU count one more version.
    "mm": lambda x, out: torch.mm(x, x, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "nonzero": lambda x, out: torch.nonzero(x, out=out),
    "sort": lambda x, out: torch.sort(x, stable=True, out=(out, out.new_empty(0).long())),
    "foo silu mul": lambda x, out: torch.ops.foo.silu_mul.out(x, x, out=out),
}
