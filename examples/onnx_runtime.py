"""Encoders of transformers in ONNX Runtime, as its users export them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OPSET = 17


class HiddenStates(nn.Module):
    """An encoder as a function of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden: Tensor = self.model(**dict(zip(INPUTS, inputs))).last_hidden_state
        return hidden


class OnnxEncoder:
    """An encoder's hidden states by ONNX Runtime, with its optimisations of graphs on.

    Raises ModuleNotFoundError without onnxruntime and onnx.

    Args:
        model: an encoder that nothing was applied to, with attention of ``"eager"``, whose form
            ONNX Runtime knows.
        inputs: tokens of a batch, to export the graph with.
        threads: as many as the others have.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor], threads: int) -> None:
        import onnx  # noqa: F401  # torch's exporter needs it
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session: Any = onnxruntime.InferenceSession(
            exported(model, inputs), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        (hidden,) = self.session.run(None, {name: inputs[name].numpy() for name in INPUTS})
        return torch.from_numpy(hidden)


def exported(model: nn.Module, inputs: Mapping[str, Tensor]) -> bytes:
    """Return a model as ONNX, for any number and length of texts.

    By the exporter of TorchScript: the newer one needs onnxscript.
    """
    file: Any = io.BytesIO()
    axes = {0: "texts", 1: "tokens"}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            HiddenStates(model),
            tuple(inputs[name] for name in INPUTS),
            file,
            input_names=list(INPUTS),
            output_names=["hidden"],
            dynamic_axes=dict.fromkeys((*INPUTS, "hidden"), axes),
            opset_version=OPSET,
            dynamo=False,
        )
    graph: bytes = file.getvalue()
    return graph
