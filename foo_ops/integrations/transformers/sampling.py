"""Tokens drawn by one function of C++, in place of ten passes over the scores of a vocabulary."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foo_ops._C import sample_tokens
from foo_ops.integrations.transformers.replacement import Replacement

Options = dict[str, Any]
"""Arguments of `sample_tokens`."""
UNCHANGED: Options = {
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "least": 1,
}
ORDER = (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
"""The order in which `sample_tokens` changes scores, which is that of `generate`."""


class TokenSampler(LogitsProcessor):
    """Draws tokens, and returns scores that are largest for them.

    A greedy search then takes these tokens: the loop of `generate` stays transformers' own.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = sample_tokens(scores, input_ids, **self.options)
        return scores.scatter_(1, drawn.unsqueeze(1), math.inf)


class FooSampler(Replacement):
    """Replaces models that generate: `sample_tokens` draws, from the same random numbers."""

    device: torch.device

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **others: Any,
    ) -> Any:
        own: Any = super()._sample  # type: ignore[misc]
        options = options_of(logits_processor, generation_config)
        is_common = own.__func__ is GenerationMixin._sample
        is_on_cpu = input_ids.is_cpu and self.device.type == "cpu"
        if options is not None and is_common and is_on_cpu and draws_alike():
            generation_config = copy.copy(generation_config)
            generation_config.do_sample = False
            logits_processor = LogitsProcessorList([TokenSampler(options)])
        return own(input_ids, logits_processor, stopping_criteria, generation_config, **others)


def options_of(processors: Sequence[LogitsProcessor], config: GenerationConfig) -> Options | None:
    """Return what `sample_tokens` has to do, or None if it cannot do all of it."""
    shows_scores = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    kinds = [type(it) for it in processors]
    if not config.do_sample or shows_scores or kinds != [it for it in ORDER if it in kinds]:
        return None
    options = dict(UNCHANGED)
    for processor in processors:
        if not is_common(processor):
            return None
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            options["repetition_penalty"] = processor.penalty
        elif isinstance(processor, TemperatureLogitsWarper):
            options["temperature"] = processor.temperature
        elif isinstance(processor, TopKLogitsWarper):
            options["top_k"] = processor.top_k
        elif isinstance(processor, TopPLogitsWarper):
            options |= {"top_p": processor.top_p, "least": processor.min_tokens_to_keep}
    return options


def is_common(processor: LogitsProcessor) -> bool:
    """Whether a processor removes tokens for good, and counts those of the whole sequence."""
    values = vars(processor)
    is_cut = any(values.get(it) is not None for it in ("prompt_ignore_length", "logits_indices"))
    return not is_cut and values.get("filter_value", -math.inf) == -math.inf


@functools.cache
def draws_alike() -> bool:
    """Whether this torch draws tokens from the numbers that `sample_tokens` takes."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        scores = torch.linspace(-2, 2, 16).repeat(8, 1)
        torch.manual_seed(0)
        theirs = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        ours = sample_tokens(scores, theirs.unsqueeze(1), **UNCHANGED)
        return torch.equal(ours, theirs) and torch.equal(torch.get_rng_state(), state)
