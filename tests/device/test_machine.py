"""Random sequences of calls give equal results on foo and on the CPU, the same in each run."""

import pytest
from hypothesis import stateful
from support import device_machine

pytestmark = pytest.mark.usefixtures("one_thread", "products_of_cpu", "quick_collections")


def test_foo_does_what_the_cpu_does():
    stateful.run_state_machine_as_test(
        device_machine.DeviceMachine,
        settings=device_machine.settings(60, 40, derandomize=True),
    )
