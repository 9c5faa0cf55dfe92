"""The losses of language models: foo::softmax_cross_entropy of logits, or of the head's input.

In training, foo::linear_cross_entropy computes head and loss together.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.utils import ModelOutput

from foo_ops.integrations.transformers.linear import (
    DeferredLogits,
    FooLinear,
    computed,
    deferred,
    is_lone,
)
from foo_ops.integrations.transformers.replacement import Replacement, has_own_forward, replace
from foo_ops.ops.cross_entropy.softmax import softmax_cross_entropy


def token_loss(
    logits: Tensor | DeferredLogits,
    target: Tensor,
    num_items_in_batch: Tensor | int | None,
    ignore_index: int,
) -> Any:
    """Return the mean over the tokens, or their sum divided by the items of accumulated batches."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    options: Any = {"reduction": reduction, "ignore_index": ignore_index}
    target = target.to(logits.device)
    loss: Any = None
    if isinstance(logits, DeferredLogits):
        loss = logits.cross_entropy(target, **options)
    if loss is None:
        loss = softmax_cross_entropy(computed(logits), target, **options)
    # transformers converts the logits to float32, so its loss is float32.
    loss = loss.float()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def causal_lm_loss(
    logits: Tensor | DeferredLogits,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Replaces transformers' ``ForCausalLMLoss``; each token's target is the next one.

    The logits are read in their own dtype, without a copy.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = logits.reshape(-1, vocab_size)
    return token_loss(rows, shift_labels.reshape(-1), num_items_in_batch, ignore_index)


def masked_lm_loss(
    logits: Tensor | DeferredLogits,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **others: Any,
) -> Tensor:
    """Replaces transformers' ``ForMaskedLMLoss``."""
    rows = logits.reshape(-1, vocab_size)
    return token_loss(rows, labels.reshape(-1), num_items_in_batch, ignore_index)


LOSSES = {ForCausalLMLoss: causal_lm_loss, ForMaskedLMLoss: masked_lm_loss}


# ----------------------------------------------------------------------- without logits in memory


class FooLanguageModel(Replacement):
    """Replaces models that compute a loss from the result of their output embeddings.

    In training with labels, the head returns `DeferredLogits`. If only the loss has used them, the
    model's output has no logits.
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
        # Trainers inspect the names of a model's arguments.
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
    """Return the output without logits that are still deferred.

    Logits that the model has used otherwise are in it as tensors.
    """
    if not isinstance(output, ModelOutput):
        return output
    fields = {
        name: it.computed if isinstance(it, DeferredLogits) else it for name, it in output.items()
    }
    return type(output)(**fields)


def use_linear_head(model: PreTrainedModel) -> None:
    """Let the head of a model be our linear layer, which can defer its logits."""
    head = model.get_output_embeddings()
    if head is not None and not isinstance(head, Replacement) and FooLinear.recognises(head):
        replace(head, FooLinear)
