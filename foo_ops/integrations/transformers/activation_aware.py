"""Scales of columns by activation-aware quantisation (AWQ), carried by the modules before them.

The inputs of layers are to be divided by the scales of their columns. The module that computes them
carries the division: the weight of a norm is divided, or the rows of a linear layer. Such carriers
are not known by their names, but put on trial: their results are multiplied by random powers of
two, and the inputs of the layers divided by the same. Where nothing else reads those results, all
outputs stay the same in each bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foo_ops.compat import pytree
from foo_ops.integrations.transformers.norms import (
    LAYER_NORMS,
    NORMS,
    FooOffsetLayerNorm,
    FooOffsetRMSNorm,
    one_more,
)
from foo_ops.integrations.transformers.quantized import group_size_of
from foo_ops.integrations.transformers.replacement import is_near
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.linear_quantized import column_scale

TOKENS = 16
"""Tokens of a trial."""
ROWS, FEWEST_ROWS = 256, 64
"""Rows that are kept of each input, and how many scales and ranges need."""
CANDIDATES = 4
"""Linear layers before another one that are tried as its carrier, the latest first."""
LARGEST_EXPONENT = 3
"""Powers of two in a trial are at most 8, so that float16 hardly overflows."""

Prompt: TypeAlias = Tensor | Mapping[str, Any]
"""Token ids, or the keyword arguments of a call of the model."""


class Scaling(NamedTuple):
    """How a linear layer is changed before it is rounded.

    Attributes:
        inputs: (R, K), a sample, not divided by anything.
        columns: (K,), factors of the weight's columns.
        rows: (N,), divisors of the weight's rows and of the bias, or None.
    """

    inputs: Tensor
    columns: Tensor
    rows: Tensor | None = None

    def divided(self, tensor: Tensor) -> Tensor:
        """Return a weight (N, K) or a bias (N,) with its rows divided."""
        if self.rows is None:
            return tensor
        divisors = self.rows if tensor.dim() == 1 else self.rows.unsqueeze(1)
        return (tensor / divisors).to(tensor.dtype)


@dataclass
class Group:
    """Linear layers with the same input.

    Attributes:
        layers: the layers.
        carrier: a norm or a linear layer whose results are divided, or None.
        channels: (K,), the carrier's channel that each column of the input is proportional to.
        inputs: parts of a sample of the input.
    """

    layers: list[Any]
    carrier: Any = None
    channels: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    inputs: list[Tensor] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(map(len, self.inputs))

    def of_channels(self, columns: Tensor) -> Tensor:
        """Return a number for each channel of the carrier, 1.0 if no column is of that channel."""
        found = columns.new_ones(len(self.carrier.weight))
        found[self.channels.to(columns.device)] = columns
        return found


def find_scalings(
    model: nn.Module, layers: Sequence[nn.Module], prompts: Sequence[Prompt]
) -> dict[nn.Module, Scaling]:
    """Search for the scales of layers that are about to be rounded, and let norms carry theirs.

    Raises:
        ValueError: if no layer has as many rows as are needed.
    """
    with torch.no_grad(), as_in_inference(model):
        groups = find_groups(model, layers, prompts[0])
        take_samples(model, groups, prompts)
    most = max((it.rows for it in groups), default=FEWEST_ROWS)
    if most < FEWEST_ROWS:
        raise ValueError(f"apply: prompts must have {FEWEST_ROWS} tokens or more, got {most}")
    with torch.inference_mode(False), torch.no_grad():
        return search([it for it in groups if it.rows >= FEWEST_ROWS])


def search(groups: Sequence[Group]) -> dict[nn.Module, Scaling]:
    found: dict[nn.Module, Scaling] = {}
    rows: dict[nn.Module, Tensor] = {}
    rounded = {layer for group in groups for layer in group.layers}
    for group in groups:
        inputs = torch.cat(group.inputs)
        group.inputs.clear()
        columns = inputs.new_ones(inputs.shape[1], dtype=torch.float32)
        if isinstance(group.carrier, nn.Linear):
            if group.carrier in rounded:
                columns = scale_of(group, inputs)
                rows[group.carrier] = group.of_channels(columns)
        elif group.carrier is not None:
            columns = divide_norm(group.carrier, scale_of(group, inputs))
        found |= dict.fromkeys(group.layers, Scaling(inputs, columns))
    return {layer: it._replace(rows=rows.get(layer)) for layer, it in found.items()}


def scale_of(group: Group, inputs: Tensor) -> Tensor:
    """Search for the factors of columns; those of one channel are the same."""
    means, channels = inputs.float().abs().mean(0), group.channels.to(inputs.device)
    sums, counts = (
        means.new_zeros(len(group.carrier.weight)).index_add(0, channels, it)
        for it in (means, torch.ones_like(means))
    )
    weights = [it.weight.detach() for it in group.layers]
    size: Any = group_size_of(weights[0])
    return column_scale(weights, size, inputs, (sums / counts)[channels])


# ------------------------------------------------------------------------------------------- norms


def norm_of(module: nn.Module) -> Any:
    """Return the replacement that computes the same as a norm, or None."""
    kinds = (*NORMS, *LAYER_NORMS)
    return next((it for it in kinds if isinstance(module, it) or it.recognises(module)), None)


def divide_norm(norm: Any, scale: Tensor) -> Tensor:
    """Divide a norm's weight and bias by a scale; return it as their rounding has changed it."""
    is_offset = issubclass(norm_of(norm), (FooOffsetRMSNorm, FooOffsetLayerNorm))
    weight = norm.weight.detach()
    factor = one_more(weight) if is_offset else weight.to(compute_type(weight.dtype))
    divided = (factor / scale - int(is_offset)).to(weight.dtype)
    # A channel of zeros keeps its weight, since any scale fits.
    divided = torch.where(factor == 0, weight, divided)
    now = one_more(divided) if is_offset else divided
    exact = torch.where(factor == 0, 1.0, factor / now)
    norm.weight = nn.Parameter(divided, norm.weight.requires_grad)
    if getattr(norm, "bias", None) is not None:
        bias = (norm.bias.detach() / exact).to(norm.bias.dtype)
        norm.bias = nn.Parameter(bias, norm.bias.requires_grad)
    return exact


# ----------------------------------------------------------------------------------------- samples


@contextmanager
def as_in_inference(model: nn.Module) -> Iterator[None]:
    """Let a model compute without dropout, and without caches, which calls would write to."""
    training = {it: it.training for it in model.modules()}
    configs = [it.config for it in model.modules() if isinstance(it, PreTrainedModel)]
    caches = [(it, it.use_cache) for it in configs if getattr(it, "use_cache", None) is not None]
    model.eval()
    for config, _ in caches:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in reversed(caches):
            config.use_cache = value
        for module, mode in training.items():
            module.training = mode


def run(model: nn.Module, prompt: Prompt) -> Any:
    return model(**prompt) if isinstance(prompt, Mapping) else model(prompt)


def take_samples(model: nn.Module, groups: Sequence[Group], prompts: Sequence[Prompt]) -> None:
    """Run all prompts, and keep rows of each input, evenly spread, without padding."""
    quota = -(-ROWS // len(prompts))
    mask: Any = None

    def keeper(group: Group) -> Any:
        def keep(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            input = arguments[0]
            is_masked = isinstance(mask, Tensor) and mask.shape == input.shape[:-1]
            rows = input[mask.bool()] if is_masked else input.unsqueeze(0).flatten(0, -2)
            if group.rows < ROWS and len(rows):
                places = torch.linspace(0, len(rows) - 1, min(quota, len(rows)))
                group.inputs.append(rows[places.long().to(rows.device)])

        return keep

    with ExitStack() as stack:
        for group in groups:
            stack.callback(group.layers[0].register_forward_pre_hook(keeper(group)).remove)
        for prompt in prompts:
            mask = prompt.get("attention_mask") if isinstance(prompt, Mapping) else None
            run(model, prompt)


# ---------------------------------------------------------------------------------------- carriers


class Call(NamedTuple):
    """A call of a module while the model runs."""

    name: str
    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any

    def again(self) -> Any:
        given = (self.arguments, self.keywords)
        arguments, keywords = pytree.tree_map_only(Tensor, Tensor.clone, given)
        return self.module(*arguments, **keywords)


def calls_of(model: nn.Module, prompt: Prompt) -> list[Call]:
    """Return the calls of all modules in one run, in the order in which they end."""
    calls: list[Call] = []

    def recorder(name: str) -> Any:
        return lambda *call: calls.append(Call(name, *call))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(recorder(name), with_kwargs=True)
            stack.callback(hook.remove)
        run(model, prompt)
    return calls


def shortened(prompt: Prompt) -> Prompt:
    """Return the first tokens of the first sequence, or all if other sizes belong to them."""
    if isinstance(prompt, Tensor):
        return prompt[:1, :TOKENS] if is_ids(prompt) else prompt
    tensors = {name: it for name, it in prompt.items() if isinstance(it, Tensor)}
    shapes = {tuple(it.shape[:2]) for it in tensors.values()}
    if len(shapes) != 1 or not any(map(is_ids, tensors.values())):
        return prompt
    mask = prompt.get("attention_mask", torch.ones(shapes.pop()))
    kept = mask[0].nonzero().flatten()[:TOKENS]
    return {**prompt, **{name: it[:1, kept.to(it.device)] for name, it in tensors.items()}}


def is_ids(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def find_groups(model: nn.Module, layers: Sequence[nn.Module], prompt: Prompt) -> list[Group]:
    """Return the groups of all layers, with the carriers that have stood their trials."""
    short = shortened(prompt)
    calls = calls_of(model, short)
    groups = grouped(calls, layers)
    owners = Counter(id(it) for module in model.modules() for it in module._parameters.values())
    models = [name for name, it in model.named_modules() if isinstance(it, PreTrainedModel)]
    names = {module: name for name, module in model.named_modules()}
    first_calls = {call.name: call for call in reversed(calls)}
    rounded, taken = set(layers), set[nn.Module]()
    for group in groups:
        for carrier, channels in candidates(group, calls, rounded):
            group.carrier, group.channels = carrier, channels
            involved = [names[it] for it in (carrier, *group.layers)]
            if (
                carrier not in taken
                and owners[id(carrier.weight)] == 1
                and not leaves_a_model(models, *involved)
                and is_unchanged(first_calls[common_module(first_calls, involved)].again, [group])
            ):
                taken.add(carrier)
                break
            group.carrier = None
    carried = [it for it in groups if it.carrier is not None]
    for group in disturbing(lambda: run(model, short), carried):
        group.carrier = None
    return groups


def grouped(calls: Sequence[Call], layers: Sequence[nn.Module]) -> list[Group]:
    """Group layers by their inputs; layers that have not been called are alone."""
    by_input: dict[tuple[int, ...], list[Any]] = {}
    left = dict.fromkeys(layers)
    for call in calls:
        if call.module in left and call.arguments:
            del left[call.module]
            by_input.setdefault(place_of(call.arguments[0]), []).append(call.module)
    return [Group(it) for it in (*by_input.values(), *([it] for it in left))]


def place_of(tensor: Any) -> tuple[int, ...]:
    """Return the same for views of the same rows, as long as these are in memory."""
    return tensor.data_ptr(), tensor.numel(), tensor.shape[-1]


def candidates(
    group: Group, calls: Sequence[Call], layers: set[nn.Module]
) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield modules that may carry a group's scale, with the channel of each column."""
    number = next((n for n, it in enumerate(calls) if it.module is group.layers[0]), None)
    if number is None:
        return
    input, before = calls[number].arguments[0], calls[:number]
    if not input.any():  # a trial would show nothing
        return
    for call in reversed(before):
        is_source = isinstance(call.output, Tensor) and place_of(call.output) == place_of(input)
        if is_source and norm_of(call.module) is not None:
            yield call.module, torch.arange(input.shape[-1])
            return
    heads = {getattr(it.module, "head_dim", None) for it in calls} - {None}
    linear = [it for it in before if it.module in layers and it.module not in group.layers]
    for call in reversed(linear[-CANDIDATES:]):
        for channels in maps_of(call.output.shape[-1], input.shape[-1], heads):
            yield call.module, channels


def maps_of(channels: int, columns: int, heads: set[Any]) -> Iterator[Tensor]:
    """Yield maps from columns to the channels that they may be proportional to.

    Values of few heads are repeated for all heads. Layers that compute several things have the
    values behind queries and keys, and the factor of a gate in one of two halves.

    Args:
        heads: sizes of heads.
    """
    places = [(0, channels)]
    if channels > columns:
        values = (channels - columns) // 2
        places = [(channels - values, values), (columns, columns), (0, columns)]
    for start, width in places:
        if width == 0 or columns % width > 0 or start + width > channels:
            continue
        copies, values_of = columns // width, torch.arange(start, start + width)
        for size in heads if copies > 1 else {width}:
            if width % size == 0:
                yield values_of.view(-1, size).repeat_interleave(copies, 0).flatten()


def leaves_a_model(models: Sequence[str], carrier: str, *layers: str) -> bool:
    """Whether a carrier's results may be results of a model, which must stay as they are."""
    return any(
        is_inside(carrier, model) and not all(is_inside(it, model) for it in layers)
        for model in models
    )


def is_inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def common_module(calls: Mapping[str, Call], names: Sequence[str]) -> str:
    """Return the name of the innermost module around others that has been called."""
    parts = names[0].split(".")
    outer = (".".join(parts[:length]) for length in reversed(range(len(parts))))
    return next(it for it in outer if it in calls and all(is_inside(name, it) for name in names))


def disturbing(compute: Callable[[], Any], groups: list[Group]) -> list[Group]:
    """Return the groups that a result shows when they are scaled."""
    if not groups or is_unchanged(compute, groups):
        return []
    if len(groups) == 1:
        return groups
    half = len(groups) // 2
    return [*disturbing(compute, groups[:half]), *disturbing(compute, groups[half:])]


def is_unchanged(compute: Callable[[], Any], groups: Sequence[Group]) -> bool:
    """Whether a result stays the same while groups are scaled."""
    before = tensors_of(compute())
    with ExitStack() as stack:
        for seed, group in enumerate(groups):
            stack.enter_context(scaled(group, seed))
        after = tensors_of(compute())
    return bool(before) and all(map(is_same, before, after))


def is_same(before: Tensor, after: Tensor) -> bool:
    # Numbers of float16 below 6e-5 have fewer bits, so that a power of two rounds them otherwise.
    has_few_bits = before.dtype == torch.float16
    return torch.equal(before, after) or (has_few_bits and is_near(before, after))


def tensors_of(result: Any) -> list[Tensor]:
    return [it.nan_to_num() for it in pytree.tree_leaves(result) if isinstance(it, Tensor)]


@contextmanager
def scaled(group: Group, seed: int) -> Iterator[None]:
    """Multiply a carrier's results by random powers of two, and divide the layers' inputs."""
    generator, weight = torch.Generator().manual_seed(seed), group.carrier.weight
    exponents = torch.randint(LARGEST_EXPONENT + 1, group.channels.shape, generator=generator)
    factors = group.of_channels((2.0**exponents).to(weight))
    divisors = factors[group.channels.to(weight.device)]
    with ExitStack() as stack:
        hook = group.carrier.register_forward_hook(lambda _, __, output: output * factors)
        stack.callback(hook.remove)
        for layer in group.layers:
            hook = layer.register_forward_pre_hook(lambda _, given: given[0] / divisors)
            stack.callback(hook.remove)
        yield
