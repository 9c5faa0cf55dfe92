"""A device with faults, for tests of the conformance runs: the CPU, some functions replaced."""

import itertools
import os

import torch

calls = itertools.count()
right = torch.erfinv


def wrong(*args, **kwargs):
    """Give each call another result."""
    return right(*args, **kwargs) + next(calls)


def missing(*args, **kwargs):
    """Work on the CPU, which is asked first, and not on the device."""
    if next(calls) % 2:
        raise NotImplementedError("sinc is not there")
    return torch.sin(*args, **kwargs)


torch.erfinv = wrong
torch.cosh = lambda *args, **kwargs: os._exit(3)
torch.sinc = missing
