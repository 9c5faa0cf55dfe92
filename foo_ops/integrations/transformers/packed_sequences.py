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


class Packing(Replacement):
    """Base class of replacements that call layers with the tokens of all sequences in one row."""

    def is_safe(self) -> bool:
        """Whether tokens in one row have the same results as in a padded batch, by a trial."""
        raise NotImplementedError

    def sees_packed(self) -> bool:
        """Whether packed tokens are seen by nothing but modules as they were tried."""
        modules: Iterable[nn.Module] = self.modules()  # type: ignore[attr-defined]
        return not torch.compiler.is_compiling() and not any(
            it.training
            or (it is not self and has_hooks(it))
            or (isinstance(it, FooAttention) and not attends_to_packed(it))
            for it in modules
        )


class FooEncoder(Packing):
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
        is_alone_given = not any(map(matters, (*others, *keywords.values())))
        is_batch = is_taken(hidden_states) and hidden_states.dim() == 3
        if is_alone_given and is_batch and self.sees_packed():
            shown = shown_tokens(attention_mask, hidden_states)
        # The first token of each sequence is what poolers read.
        if shown is None or bool(shown.all()) or not bool(shown[:, 0].all()):
            return super().forward(hidden_states, attention_mask, *others, **keywords)  # type: ignore[misc]
        return run_packed(self, hidden_states, shown, keywords)


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
    sequences, places = sequences_of(shown)
    packed = rows_at(places, hidden_states)
    result = encoder.original.forward(encoder, packed, sequences, **keywords)
    return padded(result, places, shown)


def sequences_of(shown: Tensor) -> tuple[PackedSequences, Tensor]:
    """Return the sequences of shown tokens (B, S), and the places of these in the batch."""
    lengths = shown.sum(-1, dtype=torch.int32)
    starts = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    places = shown.flatten().nonzero().squeeze(-1)
    return PackedSequences(starts, int(lengths.max())), places


def rows_at(places: Tensor, tensor: Tensor) -> Tensor:
    """Return the tokens at places of a batch, (B, S, ...), as a batch of one sequence."""
    return tensor.flatten(0, 1).index_select(0, places).unsqueeze(0)


def padded(result: Any, places: Tensor, shown: Tensor) -> Any:
    """Put the hidden states of packed tokens back into a batch."""
    rows = result.last_hidden_state.squeeze(0)
    whole = rows.new_zeros(shown.numel(), rows.shape[-1]).index_copy(0, places, rows)
    result.last_hidden_state = whole.unflatten(0, shown.shape)
    return result


# ------------------------------------------------------------------- models that know positions


INPUTS = ["input_ids", "attention_mask", "position_ids", "inputs_embeds"]
TYPES = {"full_attention", "sliding_attention"}


class FooPackedModel(Packing):
    """Replaces models such as ModernBERT, whose layers get rotations of ``position_ids``.

    Their own forward takes a dict with a mask for each type of layer. Windows count packed tokens,
    so sequences must have no holes.
    """

    config: Any
    _modules: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        names = list(inspect.signature(type(module).forward).parameters)
        types = getattr(getattr(module, "config", None), "layer_types", None) or ()
        return (
            names[1:5] == INPUTS
            and len(names) == 6
            and bool(types)
            and set(types) <= TYPES
            and layers_of(module) is not None
            and not has_own_forward(module)
        )

    def is_safe(self) -> bool:
        """Whether tokens in one row have the same results as in a padded batch, by a trial.

        Layers of each kind are tried, in float32 or wider, on sequences that are longer than the
        window.
        """
        name, layers = layers_of(self)  # type: ignore[arg-type, misc]
        parameters = list(self.parameters())  # type: ignore[attr-defined]
        if not all(map(has_numbers, parameters)):
            return False
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        modules: Iterable[nn.Module] = self.modules()  # type: ignore[attr-defined]
        tables = [id(it) for it in modules if isinstance(it, nn.Embedding)]

        def copied(module: nn.Module) -> nn.Module:
            """Copy a module without tables of embeddings, which are not called."""
            memo: dict[int, Any] = {it: nn.Identity() for it in tables}
            return copy.deepcopy(module, memo).eval().to("cpu", dtype)

        try:
            trial = {k: copied(it) for k, it in self._modules.items() if k != name}
            trial[name] = nn.ModuleList(map(copied, distinct(layers)))
        except Exception:  # modules that cannot be copied
            return False
        twin: Any = copy.copy(self)
        vars(twin).update(_modules=trial, training=False)
        size = 2 * (getattr(self.config, "sliding_window", None) or 0) + 8
        generator = torch.Generator().manual_seed(0)
        sizes = 3, size, self.config.hidden_size
        input = torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)
        shown = torch.arange(size) < torch.tensor([size, 2, size - 1])[:, None]
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                own = self.original.forward(twin, None, shown.long(), None, input)
                ours = run_packed_model(twin, None, input, shown, {})
            except Exception:  # a model whose layers do more than foo's attention
                return False
        return is_alone(own) and is_near(
            own.last_hidden_state[shown], ours.last_hidden_state[shown]
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        others = (position_ids, *keywords.values())
        given = input_ids if inputs_embeds is None else inputs_embeds
        config = self.config
        if (
            any(map(matters, others))
            or (input_ids is None) == (inputs_embeds is None)
            or config.output_hidden_states
            or config.output_attentions
            or not has_numbers(attention_mask)
            or not is_taken(next(self.parameters()))  # type: ignore[attr-defined]
            or attention_mask.shape != given.shape[:2]  # type: ignore[union-attr]
            or not self.sees_packed()
        ):
            return super().forward(  # type: ignore[misc]
                input_ids, attention_mask, position_ids, inputs_embeds, **keywords
            )
        shown = attention_mask != 0
        has_holes = bool((shown[:, 1:] & ~shown[:, :-1]).any())
        if has_holes or bool(shown.all()) or not bool(shown[:, 0].all()):
            return super().forward(  # type: ignore[misc]
                input_ids, attention_mask, None, inputs_embeds, **keywords
            )
        return run_packed_model(self, input_ids, inputs_embeds, shown, keywords)


def distinct(layers: nn.ModuleList) -> list[nn.Module]:
    """Return the first layer of each kind."""
    found: list[tuple[list[Any], nn.Module]] = []
    for layer in layers:
        own = traits(layer)
        if all(own != other for other, _ in found):
            found.append((own, layer))
    return [layer for _, layer in found]


def run_packed_model(
    model: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    shown: Tensor,
    keywords: dict[str, Any],
) -> Any:
    """Call a model's own forward with the shown tokens only; padding becomes zeros."""
    sequences, places = sequences_of(shown)
    masks = {"full_attention": sequences}
    if (window := getattr(model.config, "sliding_window", None)) is not None:
        masks["sliding_attention"] = PackedSequences(sequences.starts, sequences.longest, window)
    result = model.original.forward(
        model,
        None if input_ids is None else rows_at(places, input_ids),
        masks,
        (places % shown.shape[1]).unsqueeze(0),
        None if inputs_embeds is None else rows_at(places, inputs_embeds),
        **keywords,
    )
    return padded(result, places, shown)
