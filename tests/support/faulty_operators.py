"""A faulty device for tests of the conformance runs: the CPU with some functions replaced."""

import itertools
import os

import torch

calls = itertools.count()
right = torch.erfinv


def wrong(*args, **kwargs):
    """Return a different result for each call."""
    return right(*args, **kwargs) + next(calls)


def missing(*args, **kwargs):
    """Work for every first call, on the CPU, and raise for every second one, on the device."""
    if next(calls) % 2:
        raise NotImplementedError("sinc is not there")
    return torch.sin(*args, **kwargs)


torch.erfinv = wrong
torch.cosh = lambda *args, **kwargs: os._exit(3)
torch.sinc = missing
