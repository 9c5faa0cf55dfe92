"""Make a small model of each class, with random weights that make errors visible."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import transformers
from support.model_zoo.configurations import small_config
from support.model_zoo.inputs import arguments_of, candidates
from transformers import PreTrainedModel

MOST_PARAMETERS = 9_000_000
SPREAD = 0.1


class NotMadeError(Exception):
    """A small model of this class cannot be made, or the original model does not run."""


class Made(NamedTuple):
    """A model and its call options."""

    model: PreTrainedModel
    options: dict[str, Any]


def make(model_type: str, kind: type[PreTrainedModel]) -> Made:
    """Make a small model that runs as it is. Raises NotMadeError, with the reason."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    config = attempt("configuration", small_config, model_type)
    with torch.device("meta"):
        count = sum(it.numel() for it in attempt("constructor", kind, config).parameters())
    if count > MOST_PARAMETERS:
        raise NotMadeError(f"too large: {count / 1e6:.1f} million parameters")
    torch.manual_seed(0)
    model = attempt("constructor", kind, small_config(model_type)).eval()
    spread_weights(model)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.eos_token_id = generation.forced_eos_token_id = None
    return Made(model, options_of(model))


def attempt(step: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise NotMadeError(f"{step}: {said(error)}") from error


def said(error: BaseException) -> str:
    lines = [it.strip() for it in str(error).splitlines() if it.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:300]


def spread_weights(model: PreTrainedModel) -> None:
    """Randomise constant weights: gates of zeros and norms of ones would hide errors."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            alike = parameter.numel() > 1 and parameter.std() < 1e-4
            if parameter.ndim < 2 or alike or not parameter.isfinite().all():
                parameter.nan_to_num_(0.0)
                parameter.add_(SPREAD * torch.randn(parameter.shape, generator=generator))


def options_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return options with which the model returns hidden states, if it can."""
    return {"output_hidden_states": True} if "return_dict" in arguments_of(model) else {}


def inputs_of(made: Made, side: str | None) -> dict[str, Any]:
    """Return the first inputs that the original model accepts. Raises NotMadeError."""
    errors = []
    for inputs in candidates(made.model, side):
        if (error := inputs.get("error")) is None:
            try:
                with torch.no_grad():
                    made.model(**inputs)
                return inputs
            except Exception as raised:
                error = raised
        errors.append(error)
    raise NotMadeError(f"forward: {said(errors[0])}" if errors else "no inputs") from errors[0]
