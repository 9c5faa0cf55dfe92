"""Lightning trains on foo with the accelerator registered under its name."""

import pytest
import torch

lightning = pytest.importorskip("lightning")
register = pytest.importorskip("foo_ops.integrations.lightning").register
SingleDeviceStrategy = pytest.importorskip("lightning.pytorch.strategies").SingleDeviceStrategy


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)
        self.seen = []

    def training_step(self, batch):
        self.seen.append(batch.device)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(devices=1, **options):
    torch.manual_seed(1)
    module = Line()
    data = torch.utils.data.DataLoader(torch.rand(12, 3, dtype=torch.float64), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=2, devices=devices, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, data)
    return module, trainer


@pytest.mark.parametrize("index", [0, 1])
def test_training_is_that_of_the_cpu(index):
    register()
    register()
    expected, _ = trained(accelerator="cpu")
    strategy = SingleDeviceStrategy("foo:1") if index == 1 else "single_foo"
    actual, trainer = trained(accelerator="foo", strategy=strategy)
    assert trainer.strategy.root_device == torch.device("foo", index)
    assert {str(device) for device in actual.seen} == {f"foo:{index}"}
    assert len(actual.seen) == 6
    torch.testing.assert_close(actual.layer.weight.cpu(), expected.layer.weight)
    torch.foo.set_device(0)


def test_the_strategy_must_be_named():
    register()
    message = 'device must be of type foo, got cpu; pass strategy="single_foo"'
    with pytest.raises(ValueError, match=message):
        trained(accelerator="foo")


@pytest.mark.parametrize(
    ("devices", "indices"), [(1, [0]), (2, [0, 1]), (-1, [0, 1]), ("1,", [1]), ("2", [0, 1])]
)
def test_devices(devices, indices):
    from foo_ops.integrations.lightning import FooAccelerator

    assert FooAccelerator.parse_devices(devices) == indices
    assert FooAccelerator.get_parallel_devices(indices) == [
        torch.device("foo", index) for index in indices
    ]
    assert FooAccelerator().get_device_stats("foo:1") == torch.foo.memory_stats(1)


@pytest.mark.parametrize("devices", [3, [2], [], "0,5"])
def test_other_devices_are_refused(devices):
    from foo_ops.integrations.lightning import FooAccelerator

    with pytest.raises(ValueError, match=r"^lightning: devices must be from 0 to 1, got "):
        FooAccelerator.parse_devices(devices)
    with pytest.raises(ValueError, match=r"^lightning: device must be of type foo, got cpu; "):
        FooAccelerator().setup_device(torch.device("cpu"))
