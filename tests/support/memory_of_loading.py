"""Measures the peak of memory while a checkpoint is loaded and applied, in a process of its own."""

import json

from support.processes import python

PROGRAM = """
import importlib, json, sys, time
import foo_ops, torch, transformers
from foo_ops.integrations.transformers import apply

given = json.loads(sys.stdin.read())
for name in given["imports"]:
    importlib.import_module(name)

def in_bytes(name):
    lines = dict(it.split(":") for it in open("/proc/self/status"))
    return 1024 * int(lines[name].split()[0])

# Imports and the linker of kernels do not depend on the size of a model.
foo_ops.abs(torch.ones(1))
config = getattr(transformers, given["config"])(**given["small"])
apply(transformers.AutoModelForCausalLM.from_config(config))
before, start = in_bytes("VmRSS"), time.perf_counter()
model = transformers.AutoModelForCausalLM.from_pretrained(given["folder"], **given["options"])
apply(model)
print(json.dumps([in_bytes("VmHWM") - before, time.perf_counter() - start]))
"""

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
LLAMA = "LlamaConfig", {**SMALL, "intermediate_size": 64}
QWEN3_MOE = (
    "Qwen3MoeConfig",
    {
        **SMALL,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
)


def check_peak(folder, size, most, small=LLAMA, imports=(), **options):
    """Require a peak of at most ``most`` times the file's size, in bytes.

    Args:
        small: the class and the sizes of a configuration, of whose kind a model is applied first.
        imports: modules that loading would import.
        options: of from_pretrained.
    """
    config, sizes = small
    given = {"folder": str(folder), "config": config, "small": sizes}
    given |= {"imports": imports, "options": options}
    # The first process compiles kernels, which takes memory and time once for an installation.
    for _ in range(2):
        process = python(PROGRAM, input=json.dumps(given), new=True)
        assert process.returncode == 0, process.stderr
    peak, seconds = json.loads(process.stdout.splitlines()[-1])
    print(f"{peak / size:.2f} of {size / 1e6:.0f} MB, {seconds:.2f} seconds")
    assert peak <= most * size
