"""The classes of transformers for each model type."""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path

from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

# Besides the base model, one head per model type: from the first mapping that has the type.
HEADS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "TEXT_TO_WAVEFORM",
    "MASKED_LM",
    "CTC",
    "RNNT",
    "TDT",
    "PRETRAINING",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "MASK_GENERATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "VISUAL_QUESTION_ANSWERING",
    "DOCUMENT_QUESTION_ANSWERING",
    "IMAGE_TO_IMAGE",
    "TIME_SERIES_PREDICTION",
    "TEXT_TO_SPECTROGRAM",
    "SEQUENCE_CLASSIFICATION",
)


def model_types() -> list[str]:
    return sorted(CONFIG_MAPPING_NAMES)


def classes_of(model_type: str) -> list[type[PreTrainedModel]]:
    """Return the base model of a type and one with a head, where they exist."""
    heads = (mapped(f"MODEL_FOR_{it}_MAPPING_NAMES", model_type) for it in HEADS)
    found = [mapped("MODEL_MAPPING_NAMES", model_type), next(filter(None, heads), None)]
    known = [it for it in dict.fromkeys(found) if it is not None]
    return known or unmapped(model_type)


def mapped(mapping: str, model_type: str) -> type[PreTrainedModel] | None:
    names = getattr(modeling_auto, mapping).get(model_type, ())
    for name in (names,) if isinstance(names, str) else names:
        for module in modules_of(model_type):
            found = getattr(module, name, None)
            # Some types name a class that takes only a part of their configuration.
            if found is not None and takes(found, CONFIG_MAPPING[model_type]):
                return found
    return None


def unmapped(model_type: str) -> list[type[PreTrainedModel]]:
    """Return the first class that takes the configuration, for types without an automatic class."""
    kind = CONFIG_MAPPING[model_type]
    found = [
        it
        for module in modules_of(model_type)
        for it in vars(module).values()
        if isinstance(it, type)
        and issubclass(it, PreTrainedModel)
        and it.__module__ == module.__name__
        and takes(it, kind)
        and it.forward is not PreTrainedModel.forward
    ]
    found.sort(key=lambda it: not it.__name__.endswith(("Model", "Encoder", "Decoder")))
    return found[:1]


def takes(model: type[PreTrainedModel], kind: type) -> bool:
    if model.config_class is kind:
        return True
    parameter = inspect.signature(model.__init__).parameters.get("config")
    return parameter is not None and str(parameter.annotation).strip("'") == kind.__name__


@functools.cache
def modules_of(model_type: str) -> list:
    """Return the modules with models in the folder of a configuration."""
    package, _, _ = CONFIG_MAPPING[model_type].__module__.rpartition(".")
    folder = Path(inspect.getfile(CONFIG_MAPPING[model_type])).parent
    names = sorted(it.stem for it in folder.glob("modeling_*.py"))
    return [importlib.import_module(f"{package}.{it}") for it in names]


def modality(inputs: dict) -> str:
    """Return the modality by the names of inputs: text, vision, audio, or several of them."""
    kinds = []
    if any("ids" in it and "grid" not in it for it in inputs):
        kinds.append("text")
    if any("pixel" in it or "image" in it for it in inputs):
        kinds.append("vision")
    if any(it in ("input_features", "input_values", "audio_values") for it in inputs):
        kinds.append("audio")
    return " and ".join(kinds) or "other"
