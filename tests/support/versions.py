"""The version of torch that the tests run with, where torch itself differs."""

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
