"""Inputs for a model of transformers, from the arguments that its forward has."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.model_zoo.configurations import FIRST_SPECIAL
from support.model_zoo.exceptions import TWEAKS, WITHOUT
from torch import Tensor
from transformers import PreTrainedModel

BATCH = 3
TEXTS = (18, 15, 5)
"""Tokens of each text, not counting the placeholders in which models put images and sounds."""
TARGETS = 11
FRAMES = 64
SAMPLES = 1600
GRID = (1, 4, 4)
MISSING = object()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def find(config: Any, *names: str, default: Any = MISSING) -> Any:
    """Return the first of these fields that a configuration or one of its parts has."""
    for name in names:
        if isinstance(value := getattr(config, name, None), (int, float, tuple, list)):
            return value
    for part in getattr(config, "sub_configs", ()):
        inner = getattr(config, part, None)
        if inner is not None and (value := find(inner, *names, default=None)) is not None:
            return value
    if default is MISSING:
        raise LookupError(f"no rule for an input: the configuration has none of {', '.join(names)}")
    return default


def one(value: Any) -> int:
    """Return a size given as one number or per dimension."""
    return int(value[0] if isinstance(value, (tuple, list)) else value)


def arguments_of(model: PreTrainedModel) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(model.forward).parameters
    without = WITHOUT.get(model.config.model_type, ())
    return {name: it for name, it in parameters.items() if name not in without}


def candidates(model: PreTrainedModel, side: str | None) -> Iterator[dict[str, Any]]:
    """Yield inputs of different shapes, to try until the model accepts some.

    ``side``: where shorter texts are padded; without it all are equally long.
    """
    arguments = arguments_of(model)
    media = {name: MEDIA[name](model.config) for name in arguments if name in MEDIA}
    for chosen in itertools.product(*media.values()):
        given = dict(zip(media, chosen))
        try:
            given.update(grids(model, arguments, given))
            given.update(companions(model, arguments, given))
            placeholders = placeholders_of(model, arguments, given)
        except Exception as error:
            yield {"error": error}
            continue
        given.update(texts(model, arguments, placeholders, side))
        tweak = TWEAKS.get(model.config.model_type)
        yield tweak(given, model.config) if tweak else given


def texts(
    model: PreTrainedModel, arguments: dict, placeholders: list[int], side: str | None
) -> dict[str, Tensor]:
    """Return token ids that begin with the placeholders, their mask and their types."""
    found: dict[str, Tensor] = {}
    if "input_ids" in arguments:
        lengths = [len(placeholders) + (TEXTS[0] if side is None else it) for it in TEXTS]
        ids, mask = padded(model, lengths, placeholders, side)
        found["input_ids"] = ids
        if "attention_mask" in arguments and side is not None:
            found["attention_mask"] = mask
        shape = ids.shape
        special = torch.isin(ids, torch.tensor(placeholders, dtype=torch.long))
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in arguments and (name == "mm_token_type_ids" or placeholders):
                found[name] = special.long()
        if "token_type_ids" in arguments and not placeholders:
            kinds = max(1, find(model.config, "type_vocab_size", default=1))
            found["token_type_ids"] = (torch.arange(shape[1]) >= 9).long().expand(shape) % kinds
        if "bbox" in arguments:
            boxes = torch.randint(0, 50, (*shape, 4), generator=generator())
            boxes[..., 2:] += boxes[..., :2]
            found["bbox"] = boxes
    if "decoder_input_ids" in arguments and (
        model.config.is_encoder_decoder
        or arguments["decoder_input_ids"].default is inspect.Parameter.empty
    ):
        found["decoder_input_ids"] = tokens(model, BATCH, TARGETS)
    return found


def tokens(model: PreTrainedModel, *shape: int) -> Tensor:
    size = find(model.config, "vocab_size", "text_vocab_size", default=FIRST_SPECIAL)
    return torch.randint(3, min(size, FIRST_SPECIAL), shape, generator=generator())


def padded(
    model: PreTrainedModel, lengths: list[int], placeholders: list[int], side: str | None
) -> tuple[Tensor, Tensor]:
    longest = max(lengths)
    ids = tokens(model, BATCH, longest)
    mask = torch.ones(BATCH, longest, dtype=torch.long)
    pad = find(model.config, "pad_token_id", default=0)
    pad = pad if 0 <= pad < FIRST_SPECIAL else 0
    for row, length in enumerate(lengths):
        start = longest - length if side == "left" else 0
        ids[row, start : start + len(placeholders)] = torch.tensor(placeholders, dtype=torch.long)
        outside = torch.ones(longest, dtype=torch.bool)
        outside[start : start + length] = False
        ids[row, outside] = pad
        mask[row, outside] = 0
    return ids, mask


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator())


def images(config: Any) -> list[Tensor]:
    channels = one(find(config, "num_channels", "in_channels", "in_chans", default=3))
    size = find(config, "image_size", "img_size", "input_size", default=64)
    height, width = size if isinstance(size, (tuple, list)) and len(size) > 1 else (one(size),) * 2
    frames = one(find(config, "num_frames", "frames_per_clip", default=2))
    return [
        numbers(BATCH, channels, height, width),
        numbers(BATCH, frames, channels, height, width),
        numbers(BATCH, channels, 64, 64),
        numbers(BATCH, 1, channels, height, width),
    ]


def features(config: Any) -> list[Tensor]:
    """Return spectrograms with the frames last, and with the frames first."""
    bins = one(
        find(config, "num_mel_bins", "feature_size", "n_mels", "mel_bins", "input_dim", default=16)
    )
    frames = 2 * one(find(config, "max_source_positions", default=FRAMES // 2))
    first = one(find(config, "feature_projection_input_dim", "input_feat_size", default=bins))
    shapes = [(BATCH, bins, frames), (BATCH, FRAMES, bins), (BATCH, FRAMES, first)]
    return [numbers(*shape) for shape in shapes]


def samples(config: Any) -> list[Tensor]:
    bins = one(find(config, "num_mel_bins", default=16))
    frames = one(find(config, "max_length", default=FRAMES))
    return [
        numbers(BATCH, SAMPLES),
        numbers(BATCH, 1, SAMPLES),
        numbers(BATCH, frames, bins),
    ]


def past(config: Any) -> list[Tensor]:
    length = one(find(config, "context_length", default=32))
    channels = one(find(config, "num_input_channels", default=1))
    return [numbers(BATCH, length), numbers(BATCH, length, channels)]


MEDIA: dict[str, Callable[[Any], list[Tensor]]] = {
    "pixel_values": images,
    "input_features": features,
    "input_values": samples,
    "past_values": past,
}
"""Inputs for which several shapes are tried."""


def grids(model: PreTrainedModel, arguments: dict, given: dict) -> dict[str, Tensor]:
    """Return images as rows of patches, for models that take grids."""
    config = model.config
    names = [it for it in ("image_grid_thw", "grid_thw") if it in arguments]
    if not names:
        return {}
    patch = one(find(config, "patch_size", "spatial_patch_size"))
    temporal = one(find(config, "temporal_patch_size", "patch_temporal", default=1))
    channels = one(find(config, "num_channels", "in_channels", "in_chans", default=3))
    count = GRID[0] * GRID[1] * GRID[2]
    patches = numbers(BATCH * count, channels * temporal * patch * patch)
    if config.model_type.startswith("kimi"):
        patches = patches.view(-1, channels, patch, patch)
    pixels = "hidden_states" if "hidden_states" in arguments else "pixel_values"
    return {names[0]: torch.tensor([GRID] * BATCH), pixels: patches}


def companions(model: PreTrainedModel, arguments: dict, given: dict) -> dict[str, Tensor]:
    """Return the masks and sizes that accompany images and sounds."""
    methods = [
        getattr(part, f"get_{it}_features", None)
        for it in ("image", "audio")
        for part in model.modules()
    ]
    taken = {name for it in methods if it for name in inspect.signature(it).parameters}
    names = (arguments.keys() | taken) - set(WITHOUT.get(model.config.model_type, ()))
    found: dict[str, Tensor] = {}
    pixels, sounds = given.get("pixel_values"), given.get("input_features")
    if pixels is not None and pixels.ndim >= 4:
        if "image_sizes" in names:
            found["image_sizes"] = torch.tensor([pixels.shape[-2:]] * BATCH)
        if (grid := getattr(model.config, "image_grid_pinpoints", None)) and pixels.ndim == 4:
            # The whole image, and its tiles.
            count = 1 + grid[0][0] * grid[0][1] // pixels.shape[-1] ** 2
            found["image_sizes"] = torch.tensor([grid[0]] * BATCH)
            found["pixel_values"] = pixels[:, None].repeat(1, count, 1, 1, 1)
        if "high_res_pixel_values" in names:
            found["high_res_pixel_values"] = pixels.clone()
    if sounds is not None:
        frames = find(model.config, "num_mel_bins", "n_mels", default=0)
        length = sounds.shape[2] if sounds.shape[1] == frames else sounds.shape[1]
        for name in ("input_features_mask", "feature_attention_mask"):
            if name in names:
                found[name] = torch.ones(BATCH, length, dtype=torch.long)
    if "spatial_shapes" in names:
        found |= rows_of_patches(model.config)
    if "qformer_input_ids" in names:
        found["qformer_input_ids"] = tokens(model, BATCH, TARGETS)
    if "pixel_values_videos" in arguments and pixels is None and "pixel_values" not in arguments:
        found["pixel_values_videos"] = images(model.config)[1]
    return found


def rows_of_patches(config: Any) -> dict[str, Tensor]:
    """Return images as rows of patches, and the number of patches each way."""
    side, patch = 4, one(find(config, "patch_size"))
    pixels = numbers(BATCH, side * side, find(config, "num_channels") * patch * patch)
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": torch.ones(pixels.shape[:2], dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * BATCH),
    }


def placeholders_of(model: PreTrainedModel, arguments: dict, given: dict) -> list[int]:
    """Return a text's placeholder tokens, one for each embedding of its images and sounds."""
    if "input_ids" not in arguments:
        return []
    config = model.config
    found: list[int] = []
    for kind, method in (("image", "get_image_features"), ("audio", "get_audio_features")):
        token = find(config, f"{kind}_token_id", f"{kind}_token_index", default=None)
        function = next(filter(None, (getattr(it, method, None) for it in model.modules())), None)
        if token is None or function is None:
            continue
        taken = inspect.signature(function).parameters
        chosen = {name: value for name, value in given.items() if name in taken}
        if not chosen:
            continue
        with torch.no_grad():
            result = function(**chosen)
        found += [token] * (count_of(result, config) // BATCH)
    return found


def count_of(features: Any, config: Any) -> int:
    """Return the number of embeddings that stand for all images or sounds."""
    pooled = getattr(features, "pooler_output", None)
    features = getattr(features, "last_hidden_state", features) if pooled is None else pooled
    if isinstance(features, (tuple, list)):
        return sum(count_of(it, config) for it in features)
    return features.numel() // features.shape[-1]
