"""Compare a model with foo's operators with the original model, both against float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from support.exact import Doubles, exact_copy
from support.model_zoo.classes import modality
from support.model_zoo.exceptions import ONLY_IN_TRAINING
from support.model_zoo.inputs import arguments_of
from support.model_zoo.models import Made, NotMadeError, inputs_of, make, said
from torch import Tensor, nn
from transformers import GenerationMixin

from foo_ops.integrations import transformers as integration

RATIO = 4.0
"""Bound on our error over theirs: both results have roundings of their own."""
ROUNDINGS = 256.0
"""Roundings of a norm up to which results count as equal; a wrong mask makes 10,000s."""
NEAR_TIE = 1e-4
"""Relative difference of logits up to which the next token is as good."""
NEW_TOKENS = 8
CACHES: dict[str, dict[str, Any]] = {
    "generate": {},
    "generate without cache": {"use_cache": False},
    "generate with static cache": {"cache_implementation": "static", "disable_compile": True},
}
NOT_COMPARED = ("past_key_values", "attentions", "cache", "mems", "states", "buckets")


class DiffersError(AssertionError):
    """Results differ by more than roundings."""


class NotRunError(Exception):
    """The original model raises."""


class Trio(NamedTuple):
    """The original model, its copy with foo's operators, and the original in float64."""

    theirs: nn.Module
    ours: nn.Module
    exact: nn.Module


class LenientDoubles(Doubles):
    """Computes in float64 where functions support it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        try:
            return super().__torch_function__(function, types, args, kwargs)
        except AssertionError:
            return function(*args, **(kwargs or {}))


@contextmanager
def exactly() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with LenientDoubles():
            yield
    finally:
        torch.set_default_dtype(before)


def doubles(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: it.double() if isinstance(it, Tensor) and it.is_floating_point() else it
        for name, it in inputs.items()
    }


def each(trio: Trio, function: Callable, inputs: Mapping[str, Any], *arguments: Any) -> list:
    """Return the function's results for our model, for theirs, and in float64.

    Raises NotRunError where theirs raises, and DiffersError where only ours does. Where float64
    raises, as some operators do, theirs counts as exact.
    """

    def result(model: nn.Module, given: Mapping[str, Any]) -> Any:
        torch.manual_seed(0)
        return function(model, copy.deepcopy(given), *arguments)

    try:
        theirs = result(trio.theirs, inputs)
    except Exception as error:
        raise NotRunError(said(error)) from error
    try:
        with exactly():
            exact = result(trio.exact, doubles(inputs))
    except Exception:
        exact = theirs
    try:
        return [result(trio.ours, inputs), theirs, exact]
    except Exception as error:
        raise DiffersError(f"only ours raises {said(error)}") from error


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of an output with their names."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            if not any(it in str(key) for it in NOT_COMPARED):
                yield from named_tensors(value, f"{name}.{key}".strip("."))
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            yield from named_tensors(value, f"{name}[{index}]")


def real_positions(tensor: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Return the rows of a result that do not belong to padding."""
    mask = inputs.get("attention_mask")
    if mask is not None and tensor.shape[:2] == mask.shape:
        return tensor[mask.bool()]
    if mask is not None and tensor.dim() == 3 and tensor.shape[::2] == mask.shape:
        # Scores of positions, for each question.
        return tensor.transpose(1, 2)[mask.bool()]
    return tensor


def results_of(model: nn.Module, inputs: dict[str, Any], options: dict) -> dict[str, Tensor]:
    output = model(**inputs, **options)
    return {name: real_positions(it, inputs) for name, it in named_tensors(output)}


def values(model: nn.Module, inputs: dict[str, Any], options: dict) -> dict[str, Tensor]:
    with torch.no_grad():
        return results_of(model, inputs, options)


def scalar(results: Mapping[str, Tensor]) -> Tensor:
    """Weigh the elements of all results, differently so that gradients do not cancel."""
    total = torch.zeros(())
    for it in results.values():
        if it.requires_grad and it.numel():
            weights = torch.linspace(0.5, 1.5, it.numel(), dtype=torch.float64).to(it.dtype)
            weights = weights * torch.where(torch.arange(it.numel()) % 3 == 0, -1, 1)
            finite = torch.where(it.isfinite(), it, torch.zeros_like(it))
            total = total + (finite.flatten() * weights).sum() / math.sqrt(it.numel())
    return total


def gradients(model: nn.Module, inputs: dict[str, Any], options: dict) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model.train(model.config.model_type in ONLY_IN_TRAINING)
    results = results_of(model, inputs, options)
    model.eval()
    total = scalar(results)
    if total.requires_grad:
        total.backward()
    found = {name: it.detach() for name, it in results.items()}
    return found | gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {
        f"gradient of {name}": it.grad
        for name, it in model.named_parameters()
        if it.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def training_step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    model.train()
    try:
        loss = model(**inputs).loss
        loss.backward()
        return {"loss": loss.detach(), **gradients_of(model)}
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Raise DiffersError for the result with the largest error, or one that only one side has."""
    if ours.keys() != theirs.keys():
        raise DiffersError(f"only one has {', '.join(sorted(ours.keys() ^ theirs.keys()))}"[:200])
    if theirs.keys() != exact.keys():
        exact = {name: it.double() for name, it in theirs.items()}
    norms = {name: finite(it).norm().item() for name, it in exact.items()}
    groups = {
        kind: math.hypot(*[it for name, it in norms.items() if name.startswith("gradient") == kind])
        for kind in (True, False)
    }
    worst, message = 1.0, ""
    for name, reference in exact.items():
        if theirs[name].shape != reference.shape or not same_places(theirs[name], reference):
            reference = theirs[name].double()
        if ours[name].shape != reference.shape or not same_places(ours[name], reference):
            raise DiffersError(f"{name}: {described(ours[name])}, theirs {described(theirs[name])}")
        if not reference.numel():
            continue
        epsilon = torch.finfo(ours[name].dtype).eps
        off, theirs_off = (
            (finite(it).double() - finite(reference)).norm().item()
            for it in (ours[name], theirs[name])
        )
        norm = norms[name]
        small = groups[name.startswith("gradient")] * (1.0 if name.startswith("gradient") else 0.0)
        room = RATIO * theirs_off + epsilon * (ROUNDINGS * norm + 8.0 * small)
        if off > worst * max(room, 1e-30):
            worst = off / max(room, 1e-30)
            unit = epsilon * max(norm, 1e-30)
            message = (
                f"{name}: off by {off / unit:.3g} roundings, theirs by {theirs_off / unit:.3g} "
                f"({off / max(norm, 1e-30):.2g} of the norm)"
            )
    if message:
        raise DiffersError(message)


def finite(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor))


def same_places(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.isfinite(), second.isfinite())


def described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} with {int((~tensor.isfinite()).sum())} not finite"


def generate(model: nn.Module, inputs: dict[str, Any], options: dict, **outputs: bool) -> Any:
    return model.generate(
        **inputs,
        **options,
        **outputs,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
    )


def with_logits(
    model: nn.Module, inputs: dict[str, Any], options: dict
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new tokens, the logits from which they were chosen, and all tokens."""
    output = generate(model, inputs, options, output_logits=True, return_dict_in_generate=True)
    logits = torch.stack(output.logits, 1)
    return output.sequences[:, -logits.shape[1] :], logits, output.sequences


def compare_tokens(trio: Trio, inputs: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise DiffersError if tokens differ, unless the exact logits are nearly tied."""
    (ours, _, all_ours), (theirs, *_), (exact, logits, _) = each(trio, with_logits, inputs, options)
    # Without logits, apply's own loop generates the tokens, but not in place of a model's own loop.
    if type(trio.theirs)._sample is GenerationMixin._sample:
        torch.manual_seed(0)
        alone = generate(trio.ours, copy.deepcopy(inputs), options)
        if not torch.equal(alone, all_ours):
            without, having = alone.tolist(), all_ours.tolist()
            raise DiffersError(f"tokens {without} without logits, {having} with them")
    if torch.equal(ours, theirs) or torch.equal(ours, exact):
        return
    if ours.shape != exact.shape:
        raise DiffersError(f"{tuple(ours.shape)} tokens, theirs {tuple(theirs.shape)}")
    best, second = logits.topk(2).values.unbind(-1)
    near = best - second <= NEAR_TIE * best.abs()
    for row, wrong in enumerate(ours != exact):
        if wrong.any() and not near[row, : int(wrong.nonzero()[0]) + 1].any():
            raise DiffersError(f"tokens {ours[row].tolist()}, theirs {theirs[row].tolist()}")


def trio_of(made: Made) -> Trio:
    exact = exact_copy(made.model).eval()
    if hasattr(exact, "set_experts_implementation"):
        # Grouped products have no float64.
        exact.set_experts_implementation("eager")
    return Trio(made.model, integration.apply(copy.deepcopy(made.model)), exact)


def check(model_type: str, kind: type) -> dict[str, Any]:
    """Make a model, compare it with its copy on foo's operators, and return the outcome."""
    row: dict[str, Any] = {"type": model_type, "class": kind.__name__, "checks": {}}
    try:
        made = make(model_type, kind)
        inputs = {side: inputs_of(made, side) for side in (None, "left", "right")}
    except NotMadeError as error:
        return row | {"verdict": "not made", "reason": str(error)}
    return row | compared(made, inputs)


def compare_gradients(trio: Trio, inputs: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise DiffersError if gradients differ, unless the model's own jump as far.

    The slope of a ReLU jumps where its input is 0, to within a rounding.
    """
    ours, *others = each(trio, gradients, inputs, options)
    try:
        compare(ours, *others)
    except DiffersError:
        if not any(agrees_with_rounded(ours, trio, seed, inputs, options) for seed in range(8)):
            raise


def agrees_with_rounded(
    ours: dict[str, Tensor], trio: Trio, seed: int, inputs: dict[str, Any], options: dict[str, Any]
) -> bool:
    """Whether our gradients agree with the model's own, whose weights are off by a rounding."""
    theirs, generator = copy.deepcopy(trio.theirs), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.is_floating_point():
                signs = torch.randint(-1, 2, weight.shape, generator=generator)
                weight.mul_(1 + signs * torch.finfo(weight.dtype).eps)
    rounded = Trio(theirs, trio.ours, exact_copy(theirs).eval())
    _, *others = each(rounded, gradients, inputs, options)
    try:
        compare(ours, *others)
    except DiffersError:
        return False
    return True


def compared(made: Made, inputs: dict[str | None, dict[str, Any]]) -> dict[str, Any]:
    trio = trio_of(made)
    checks: dict[str, str] = {}
    sides = ["left", "right"] if "attention_mask" in inputs["left"] else []
    run(checks, "values", lambda: compare(*each(trio, values, inputs[None], made.options)))
    for side in sides or [None]:
        name = f"padded {side}" if side else "gradients"
        run(checks, name, partial(compare_gradients, trio, inputs[side], made.options))
    if labelled := with_labels(made, inputs["right"]):
        run(checks, "training step", lambda: compare(*each(trio, training_step, labelled)))
    if made.model.can_generate():
        check_generation(trio, inputs["left"], checks)
    wrong = {name: it for name, it in checks.items() if it.startswith("differs")}
    return {
        "modality": modality(inputs[None]),
        "replaced": integration.replaced(trio.ours),
        "left alone": integration.left_alone(trio.ours),
        "checks": checks,
        "verdict": "differs" if wrong else "agrees",
        "reason": "; ".join(f"{name}: {it}" for name, it in wrong.items()),
    }


def run(checks: dict[str, str], name: str, comparison: Callable[[], None]) -> None:
    try:
        comparison()
        checks[name] = "agrees"
    except DiffersError as difference:
        checks[name] = f"differs: {difference}"
    except NotRunError as error:
        checks[name] = f"not run: {error}"


def with_labels(made: Made, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the labels, for language models."""
    if "labels" not in arguments_of(made.model) or "input_ids" not in inputs:
        return {}
    if made.model.get_output_embeddings() is None:
        return {}
    target = inputs.get("decoder_input_ids", inputs["input_ids"])
    labels = target.masked_fill(target % 5 == 0, -100)
    return {**inputs, "labels": labels}


def check_generation(trio: Trio, inputs: dict[str, Any], checks: dict[str, str]) -> None:
    """Compare new tokens with each kind of cache."""
    given = {name: it for name, it in inputs.items() if not name.startswith("decoder_")}
    for name, options in CACHES.items():
        run(checks, name, partial(compare_tokens, trio, given, options))
