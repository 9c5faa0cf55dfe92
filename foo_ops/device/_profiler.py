"""Adds foo's names to profiler events, like those of CUDA: ``self_foo_time_total``.

For ``device`` in a table's ``sort_by``, torch accepts ``cuda``, ``xpu`` and ``privateuse1``; its
column titles have the present device's name.
"""

from typing import Any

from torch.autograd import profiler_util

NAMES = (
    "device_memory_usage",
    "device_time",
    "device_time_str",
    "device_time_total",
    "device_time_total_str",
    "self_device_memory_usage",
    "self_device_time_total",
    "self_device_time_total_str",
)
STACKS_METRIC = "self_foo_time_total"

_metrics_of_torch = profiler_util.EventList.supported_export_stacks_metrics


def _metrics(self: profiler_util.EventList) -> list[str]:
    return [*_metrics_of_torch(self), STACKS_METRIC]


def _property(name: str) -> Any:
    return property(lambda event: getattr(event, name), doc=f"The same as ``{name}``.")


def register() -> None:
    for event in (profiler_util.FunctionEvent, profiler_util.FunctionEventAvg):
        for name in NAMES:
            setattr(event, name.replace("device", "foo"), _property(name))
    profiler_util.EventList.supported_export_stacks_metrics = _metrics  # type: ignore[method-assign]
