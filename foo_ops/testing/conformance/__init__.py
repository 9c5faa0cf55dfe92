"""PyTorch's own tables of operators, modules and optimizers on any device, against the CPU.

``python -m foo_ops.testing.conformance --device npu --out scores.json``
"""
