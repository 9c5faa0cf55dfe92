"""Operators of the API that custom_ops and torch._custom_ops share."""

import itertools

import torch

from foo_ops import custom_ops

NAMES = map("op{}".format, itertools.count())


class Torchs:
    """torch's own copy of the API, with the one name that only ours has."""

    def __getattr__(self, name):
        import torch._custom_ops

        return getattr(torch._custom_ops, "_destroy" if name == "destroy" else name)


APIS = {"torch": Torchs(), "foo": custom_ops}


def define(api, schema="(Tensor x, float factor) -> Tensor"):
    qualname = f"older::{next(NAMES)}"
    api.custom_op(qualname, schema)
    return qualname


def find(qualname):
    return getattr(torch.ops.older, qualname.removeprefix("older::"))


def scaled(api, backward=None, save=None, **options):
    """Define x * factor, with a gradient formula if one is given."""
    qualname = define(api)
    api.impl(qualname, device_types="cpu")(lambda x, factor: x * factor)
    api.impl_abstract(qualname)(lambda x, factor: torch.empty_like(x))
    if save is not None:
        api.impl_save_for_backward(qualname)(save)
    if backward is not None:
        api.impl_backward(qualname, **options)(backward)
    return qualname


def save_factor(inputs, output):
    return inputs.factor


def backward_of_factor(ctx, factor, grad):
    return {"x": grad * factor}
