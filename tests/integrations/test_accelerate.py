"""accelerate, transformers' Trainer and device maps use foo with the manual's one line."""

import pytest
from support.processes import python

pytest.importorskip("accelerate")

PROGRAM = """
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

def trained(weights=None):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.rand(8, 3, dtype=torch.float64), batch_size=4)
    return layer, optimizer, loader

accelerator = Accelerator()
assert accelerator.device.type == "foo", accelerator.device
expected, expected_optimizer, _ = trained()
layer, optimizer, loader = accelerator.prepare(*trained())
for batch in loader:
    assert batch.device.type == "foo"
    accelerator.backward(layer(batch).square().mean())
    expected(batch.cpu()).square().mean().backward()
    for each in (optimizer, expected_optimizer):
        each.step()
        each.zero_grad()
torch.testing.assert_close(layer.weight.cpu(), expected.weight)

config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
options = TrainingArguments(FOLDER + "/out", max_steps=2, report_to=[], save_strategy="no",
                            disable_tqdm=True)
trainer = Trainer(LlamaForCausalLM(config), options, train_dataset=rows)
assert trainer.args.device.type == "foo"
assert trainer.train().training_loss > 0
assert trainer.model.device.type == "foo"
trainer.model.save_pretrained(FOLDER + "/model")
for device_map, device in (("foo", "foo:0"), ({"": "foo:1"}, "foo:1")):
    loaded = LlamaForCausalLM.from_pretrained(FOLDER + "/model", device_map=device_map)
    assert loaded.device == torch.device(device)
    ids = torch.arange(6)[None].to(loaded.device)
    torch.testing.assert_close(loaded(ids).logits.cpu(), trainer.model(ids.to("foo")).logits.cpu())
print("done")
"""


@pytest.mark.whole
def test_the_line_of_the_manual(tmp_path):
    program = PROGRAM.replace("FOLDER", repr(str(tmp_path)))
    result = python(program, ACCELERATE_TORCH_DEVICE="foo")
    assert result.stdout.endswith("done\n"), result.stderr
