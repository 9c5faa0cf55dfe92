"""The loop of `generate` for one token after the other.

transformers' own loop prepares the arguments of each call in Python, calls a dozen operators, and
another ten over all scores where tokens are sampled. Here all that lies between two choices of
tokens is one function, `step`, of which `decode_graph` makes a program; `Sequences` chooses tokens
in C++, from the same random numbers of torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
)

from foo_ops._C import Sampling, Sequences
from foo_ops.integrations.transformers.replacement import Replacement

GREEDY = (
    RepetitionPenaltyLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
"""Processors that also change which token is the likeliest."""
ORDER = (*GREEDY, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""The order in which `Sampling` changes scores, which is that of `generate`."""
LOGITS, TOKENS = "logits", "tokens"
"""Names of the logits among the values after a step, and of all tokens so far before it."""

Values = dict[str, Any]


class Selection(NamedTuple):
    """How tokens are chosen, and when a sequence ends.

    Attributes:
        sampling: also says whether the likeliest token is taken.
        ends: tokens that end a sequence.
        padding: the token behind the end.
        length: of the longest sequence.
    """

    sampling: Sampling
    ends: list[int]
    padding: int
    length: int


class FooGenerator(Replacement):
    """Replaces models that generate; what is unusual is left to transformers' own loop."""

    device: torch.device

    def append_tokens(self, sequences: Sequences, values: Values, most: int) -> Values:
        """Append a token to each sequence, or up to ``most``; return the next step's arguments."""
        tokens = sequences.tokens()
        return chosen(sequences, step(self, tokens=tokens, **values), tokens.shape[1])

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Sequence[LogitsProcessor],
        stopping_criteria: Sequence[StoppingCriteria],
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        own: Any = super()._sample  # type: ignore[misc]
        is_usual = (
            own.__func__ is GenerationMixin._sample
            and input_ids.is_cpu
            and input_ids.dtype is torch.int64
            and self.device.type == "cpu"
            and not synced_gpus
            and not generation_config.return_dict_in_generate
            and model_kwargs.get("use_cache")
            and not self._valid_auto_compile_criteria(model_kwargs, generation_config)  # type: ignore[attr-defined]
        )
        if is_usual:
            selection = selection_of(logits_processor, stopping_criteria, generation_config)
            if selection is not None:
                return generated(
                    self, input_ids, selection, generation_config, streamer, model_kwargs
                )
        return own(
            *(input_ids, logits_processor, stopping_criteria, generation_config),
            *(synced_gpus, streamer),
            **model_kwargs,
        )


def generated(
    model: Any,
    input_ids: Tensor,
    selection: Selection,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: Values,
) -> Tensor:
    """Return sequences as transformers' loop does; ``streamer`` is given their tokens."""
    sequences = Sequences(input_ids, selection.ends, selection.padding, selection.sampling)
    outputs = model._prefill(
        input_ids, config, model_kwargs, is_first_iteration=not config.is_assistant
    )
    values = chosen(sequences, after_step(model, outputs, model_kwargs), input_ids.shape[1])
    # The logits of a prompt may be large.
    del outputs
    while True:
        if streamer is not None:
            streamer.put(sequences.tokens()[:, -1].clone())
        left = selection.length - sequences.length
        if left <= 0 or not sequences.goes_on:
            break
        values = model.append_tokens(sequences, values, left if streamer is None else 1)
    if streamer is not None:
        streamer.end()
    return sequences.tokens().clone(memory_format=torch.contiguous_format)


def step(model: Any, tokens: Tensor, **model_kwargs: Any) -> Values:
    """Call a model for the last of all tokens so far; return its logits and the next arguments."""
    inputs = model.prepare_inputs_for_generation(
        tokens.contiguous(), next_sequence_length=1, **model_kwargs
    )
    return after_step(model, model(**inputs, return_dict=True), model_kwargs)


def after_step(model: Any, outputs: Any, model_kwargs: Values) -> Values:
    values = model._update_model_kwargs_for_generation(
        outputs, dict(model_kwargs), is_encoder_decoder=model.config.is_encoder_decoder
    )
    return {**values, LOGITS: outputs.logits}


def chosen(sequences: Sequences, values: Values, length: int) -> Values:
    """Append the tokens that the logits choose, and return the other values.

    Sequences that are longer than the step's ``length`` have them: a program appends its own.
    """
    logits = values.pop(LOGITS)
    if sequences.length == length:
        sequences.append(logits)
    return values


def selection_of(
    processors: Sequence[LogitsProcessor],
    criteria: Sequence[StoppingCriteria],
    config: GenerationConfig,
) -> Selection | None:
    """Return how `Sequences` chooses tokens, or None if it cannot do so."""
    lengths = [it for it in criteria if type(it) is MaxLengthCriteria]
    of_ends = [it for it in criteria if type(it) is EosTokenCriteria]
    if len(lengths) != 1 or len(of_ends) != len(criteria) - 1 or warns(lengths[0]):
        return None
    ends = [int(end) for it in of_ends for end in it.eos_token_id]
    sampling = sampling_of(processors, ends, not config.do_sample)
    if sampling is None or not (sampling.is_greedy or draws_alike()):
        return None
    padding = config._pad_token_tensor
    if ends and (padding is None or padding.numel() != 1):
        return None
    return Selection(sampling, ends, 0 if padding is None else int(padding), lengths[0].max_length)


def warns(criterion: MaxLengthCriteria) -> bool:
    """Whether sequences become longer than a model's positions."""
    positions = criterion.max_position_embeddings
    return positions is not None and criterion.max_length > positions


def sampling_of(
    processors: Sequence[LogitsProcessor], ends: list[int], is_greedy: bool = False
) -> Sampling | None:
    """Return what changes scores, or None if something else does."""
    kinds = [type(it) for it in processors]
    known = [it for it in (GREEDY if is_greedy else ORDER) if it in kinds]
    if kinds != known or not all(is_common(it, ends) for it in processors):
        return None
    sampling = Sampling()
    sampling.is_greedy = is_greedy
    for it in processors:
        if isinstance(it, RepetitionPenaltyLogitsProcessor):
            sampling.repetition_penalty = it.penalty
        elif isinstance(it, MinLengthLogitsProcessor):
            sampling.least_length = it.min_length
        elif isinstance(it, MinNewTokensLengthLogitsProcessor):
            least = it.prompt_length_to_skip + it.min_new_tokens
            sampling.least_length = max(sampling.least_length, least)
        elif isinstance(it, TemperatureLogitsWarper):
            sampling.temperature = it.temperature
        elif isinstance(it, TopKLogitsWarper):
            sampling.top_k = it.top_k
        elif isinstance(it, TopPLogitsWarper):
            sampling.top_p, sampling.least = it.top_p, it.min_tokens_to_keep
        elif isinstance(it, MinPLogitsWarper):
            sampling.min_p = it.min_p
    return sampling


def is_common(processor: LogitsProcessor, ends: list[int]) -> bool:
    """Whether a processor removes tokens for good, and counts those of the whole sequence."""
    values = vars(processor)
    if isinstance(processor, (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)):
        return set(processor.eos_token_id.tolist()) == set(ends)
    if isinstance(processor, MinPLogitsWarper) and processor.min_tokens_to_keep != 1:
        return False
    is_cut = any(values.get(it) is not None for it in ("prompt_ignore_length", "logits_indices"))
    return not is_cut and values.get("filter_value", -math.inf) == -math.inf


@functools.cache
def draws_alike() -> bool:
    """Whether this torch draws tokens from the numbers that `Sequences` takes."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        scores = torch.linspace(-2, 2, 16).repeat(8, 1)
        torch.manual_seed(0)
        theirs = torch.multinomial(scores.softmax(-1), 1)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        ours = Sequences(theirs[:, :0], [], 0, Sampling())
        ours.append(scores)
        return torch.equal(ours.tokens(), theirs) and torch.equal(torch.get_rng_state(), state)
