"""Enables torch.distributed on device ``foo``: gloo uses its memory, without copies.

Imported together with torch.distributed.
"""

from torch.distributed.distributed_c10d import Backend


def register() -> None:
    Backend.default_device_backend_map["foo"] = Backend.GLOO
    # The fake backend computes nothing; torch's own tests run whole programs with it.
    for backend in (Backend.GLOO, Backend.FAKE):
        Backend.backend_capability[backend].append("foo")
