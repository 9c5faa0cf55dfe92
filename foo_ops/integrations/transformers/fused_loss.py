"""foo::linear_cross_entropy in the place of a language model's head and its loss."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from foo_ops.integrations.transformers.deferred_logits import DeferredLogits
from foo_ops.integrations.transformers.linear import FooLinear, deferred, is_lone
from foo_ops.integrations.transformers.replacement import Replacement, has_own_forward, replace


class FooLanguageModel(Replacement):
    """In the place of models that compute a loss from what their output embeddings give.

    While a training model has labels, its head gives `DeferredLogits`. Where nothing but the loss
    has used them, the model's output has no logits.
    """

    training: bool
    config: Any
    get_output_embeddings: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        if not isinstance(module, PreTrainedModel) or has_own_forward(module):
            return False
        has_head = isinstance(module.get_output_embeddings(), FooLinear)
        return has_head and "labels" in inspect.signature(type(module).forward).parameters

    @classmethod
    def attributes(cls, original: type[nn.Module]) -> dict[str, Any]:
        # Trainers read the names of a model's arguments.
        @wraps(original.forward)
        def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return FooLanguageModel.forward(self, *arguments, **keywords)

        return {"forward": forward}

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        own: Any = super().forward  # type: ignore[misc]
        if not self.training or keywords.get("labels") is None:
            return own(*arguments, **keywords)
        head = self.get_output_embeddings()
        gives_tuple = not keywords.get("return_dict", self.config.return_dict)
        if gives_tuple or not is_lone(head):
            return own(*arguments, **keywords)
        before = deferred.head
        deferred.head = head
        try:
            output = own(*arguments, **keywords)
        finally:
            deferred.head = before
        return without_deferred(output)


def without_deferred(output: Any) -> Any:
    """Return the output without the logits that were not computed.

    Those that were, since the model has used them otherwise, are in it as tensors.
    """
    if not isinstance(output, ModelOutput):
        return output
    fields = {
        name: it.computed if isinstance(it, DeferredLogits) else it for name, it in output.items()
    }
    return type(output)(**fields)


def use_fused_loss(model: PreTrainedModel) -> None:
    """Let a model with a linear head compute its loss without logits."""
    head = model.get_output_embeddings()
    if head is not None and not isinstance(head, Replacement) and FooLinear.recognises(head):
        replace(head, FooLinear)
    if not isinstance(model, Replacement) and FooLanguageModel.recognises(model):
        replace(model, FooLanguageModel)
