"""foo::softmax_cross_entropy as the loss of language models, where there are logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from foo_ops.integrations.transformers.deferred_logits import DeferredLogits, computed
from foo_ops.ops.softmax_cross_entropy import softmax_cross_entropy


def token_loss(
    logits: Tensor | DeferredLogits,
    target: Tensor,
    num_items_in_batch: Tensor | int | None,
    ignore_index: int,
) -> Any:
    """Return the mean over the tokens, or their sum over how many a batch of several steps has."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    options: Any = {"reduction": reduction, "ignore_index": ignore_index}
    target = target.to(logits.device)
    loss: Any = None
    if isinstance(logits, DeferredLogits):
        loss = logits.cross_entropy(target, **options)
    if loss is None:
        loss = softmax_cross_entropy(computed(logits), target, **options)
    # transformers converts the logits.
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
    """In the place of transformers' ``ForCausalLMLoss``; the token behind each is its target.

    The logits are read in the dtype that they have, and no copy of them is made.
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
    """In the place of transformers' ``ForMaskedLMLoss``."""
    rows = logits.reshape(-1, vocab_size)
    return token_loss(rows, labels.reshape(-1), num_items_in_batch, ignore_index)


LOSSES = {ForCausalLMLoss: causal_lm_loss, ForMaskedLMLoss: masked_lm_loss}
