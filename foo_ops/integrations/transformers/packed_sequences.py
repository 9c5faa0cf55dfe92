"""Encoders on batches of sequences of different lengths, without work on padding.

An encoder's own forward is called with the tokens of all sequences in one row, and with
`PackedSequences` in place of the mask, which only foo's attention understands.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput
from transformers.utils.import_utils import is_tracing

from foo_ops.integrations.transformers.attention import PackedSequences
from foo_ops.integrations.transformers.attention_layers import FooAttention, own_function
from foo_ops.integrations.transformers.replacement import (
    Replacement,
    has_hooks,
    has_numbers,
    has_own_forward,
    is_near,
    is_taken,
)

PLAIN = (bool, int, float, str, type(None))


POOLED = ("SentenceTransformer", "CrossEncoder")
CLASSIFIERS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")


def hides_padding(model: nn.Module) -> bool:
    """Whether a model returns no hidden states of padding, by the name of its class."""
    name = type(model).__name__
    return name in POOLED or name.endswith(CLASSIFIERS)


def layers_of(module: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Return the name and the list of a module's layers, if it has one list of them."""
    lists = [(k, it) for k, it in module._modules.items() if isinstance(it, nn.ModuleList)]
    return lists[0] if len(lists) == 1 and len(lists[0][1]) else None


def traits(layer: nn.Module) -> list[Any]:
    """Return the classes and plain attributes of a layer's modules, by which layers may differ."""
    return [
        (name, type(it), [(k, v) for k, v in vars(it).items() if is_trait(k, v)])
        for name, it in layer.named_modules()
    ]


def is_trait(name: str, value: Any) -> bool:
    return isinstance(value, PLAIN) and name not in ("layer_idx", "training")


def shown_tokens(mask: Any, hidden_states: Tensor) -> Tensor | None:
    """Return which tokens a mask shows, (B, S), or None if it hides anything but padding.

    Args:
        mask: bool, True = take part, or added to the scores; (B, 1, Sq, S).
    """
    batch, size, _ = hidden_states.shape
    if not has_numbers(mask) or mask.dim() != 4 or is_tracing(mask):
        return None
    if mask.shape[:2] != (batch, 1) or mask.shape[2] not in (1, size) or mask.shape[3] != size:
        return None
    shown = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (shown | (mask == torch.finfo(mask.dtype).min)).all():
        return None
    tokens = shown[:, :, :1]
    if not torch.equal(shown, tokens.expand_as(shown)):
        return None
    return tokens[:, 0, 0]


class FooEncoder(Replacement):
    """Replaces encoders such as BERT's: layers of one kind, called one after the other."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        layers = layers_of(module)
        if layers is None or has_own_forward(module):
            return False
        names = list(inspect.signature(type(module).forward).parameters)
        if names[1:3] != ["hidden_states", "attention_mask"]:
            return False
        first, *others = map(traits, layers[1])
        return all(it == first for it in others)

    def is_safe(self) -> bool:
        """Whether tokens in one row have the same results as in a padded batch, by a trial.

        Another layer than the first has the same form. It computes in float32 or wider, so that
        rounding does not hide a difference.
        """
        name, layers = layers_of(self)  # type: ignore[arg-type, misc]
        if not all(map(has_numbers, layers[0].parameters())):
            return False
        try:
            layer = copy.deepcopy(layers[0]).eval()
            dtype = torch.promote_types(next(layer.parameters()).dtype, torch.float32)
            layer = layer.to("cpu", dtype)
            width = next(it.in_features for it in layer.modules() if isinstance(it, nn.Linear))
        except Exception:  # layers without linear ones, or that cannot be copied
            return False
        twin: Any = copy.copy(self)
        vars(twin).update(_modules={**self._modules, name: [layer]}, training=False)  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(0)
        input = torch.randn(3, 8, width, generator=generator, dtype=torch.float64).to(dtype)
        shown = torch.arange(8) < torch.tensor([8, 2, 7])[:, None]
        mask = shown[:, None, None].expand(-1, 1, 8, -1)
        if implementation_of(layer) == "eager":
            mask = torch.zeros(mask.shape).to(dtype).masked_fill(~mask, torch.finfo(dtype).min)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                own = self.original.forward(twin, input, mask)
                ours = run_packed(twin, input, shown, {})
            except Exception:  # an encoder whose layers do more than foo's attention
                return False
        return is_alone(own) and is_near(
            own.last_hidden_state[shown], ours.last_hidden_state[shown]
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **keywords: Any
    ) -> Any:
        shown = None
        if not any(map(matters, (*others, *keywords.values()))) and self.can_pack(hidden_states):
            shown = shown_tokens(attention_mask, hidden_states)
        # The first token of each sequence is what poolers read.
        if shown is None or bool(shown.all()) or not bool(shown[:, 0].all()):
            return super().forward(hidden_states, attention_mask, *others, **keywords)  # type: ignore[misc]
        return run_packed(self, hidden_states, shown, keywords)

    def can_pack(self, hidden_states: Any) -> bool:
        """Whether packed tokens are seen by nothing but modules as they were tried."""
        if torch.compiler.is_compiling() or not is_taken(hidden_states) or hidden_states.dim() != 3:
            return False
        modules: Iterable[nn.Module] = self.modules()  # type: ignore[attr-defined]
        return not any(
            it.training
            or (it is not self and has_hooks(it))
            or (isinstance(it, FooAttention) and not attends_to_packed(it))
            for it in modules
        )


def matters(value: Any) -> bool:
    """Whether an argument may change what an encoder does."""
    return value is not None and value is not False


def implementation_of(layer: nn.Module) -> Any:
    """Return the name of a layer's implementation of attention."""
    configs = (
        getattr(it, "config", None) for it in layer.modules() if isinstance(it, FooAttention)
    )
    return getattr(next(configs, None), "_attn_implementation", None)


def attends_to_packed(attention: FooAttention) -> bool:
    """Whether an attention layer will call foo's attention."""
    return attention.serves_in_place_of(own_function(attention), attention.original.forward)


def is_alone(result: Any) -> bool:
    """Whether hidden states are an encoder's only output."""
    return isinstance(result, ModelOutput) and list(result.keys()) == ["last_hidden_state"]


def run_packed(encoder: Any, hidden_states: Tensor, shown: Tensor, keywords: dict[str, Any]) -> Any:
    """Call an encoder's own forward with the shown tokens only; padding becomes zeros."""
    batch, size, width = hidden_states.shape
    lengths = shown.sum(-1, dtype=torch.int32)
    starts = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    places = shown.flatten().nonzero().squeeze(-1)
    packed = hidden_states.reshape(-1, width).index_select(0, places).unsqueeze(0)
    sequences = PackedSequences(starts, int(lengths.max()))
    result = encoder.original.forward(encoder, packed, sequences, **keywords)
    rows = result.last_hidden_state.squeeze(0)
    padded = rows.new_zeros(batch * size, rows.shape[-1]).index_copy(0, places, rows)
    result.last_hidden_state = padded.unflatten(0, (batch, size))
    return result
