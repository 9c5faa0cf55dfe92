"""`apply` gives a model foo's operators, `restore` undoes it; `left_alone` lists the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foo_ops.integrations.transformers import cache as foo_cache
from foo_ops.integrations.transformers.activation_aware import Prompt
from foo_ops.integrations.transformers.attention_layers import (
    EAGER,
    FooAttention,
    FooRotaryAttention,
    FooRotaryFooAttention,
    looks_up,
    own_function,
)
from foo_ops.integrations.transformers.decode_graph import (
    FooDecoder,
    reason_of_no_graphs,
    replace_language_model,
)
from foo_ops.integrations.transformers.decoding import ATTENTION_LAYERS
from foo_ops.integrations.transformers.experts import FLAGS, FooExperts
from foo_ops.integrations.transformers.linear import FooConv1D, FooLinear
from foo_ops.integrations.transformers.loss import LOSSES, FooLanguageModel, use_linear_head
from foo_ops.integrations.transformers.mlp import FooActivatedMLP, FooGatedMLP, FooPackedMLP
from foo_ops.integrations.transformers.mxfp4 import FooMxfp4Experts
from foo_ops.integrations.transformers.norms import LAYER_NORMS, LAYERS, NORMS
from foo_ops.integrations.transformers.packed import FooPackedLinear
from foo_ops.integrations.transformers.packed_experts import FooPackedExperts
from foo_ops.integrations.transformers.packed_sequences import (
    FooEncoder,
    FooPackedModel,
    Packing,
    hides_padding,
)
from foo_ops.integrations.transformers.packing import pack
from foo_ops.integrations.transformers.quantized import (
    FooJoined,
    Quantized,
    check_activations,
    check_bits,
    rounds_input,
)
from foo_ops.integrations.transformers.quantized import quantize as quantize_layer
from foo_ops.integrations.transformers.replacement import (
    WEIGHT_TYPES,
    Replacement,
    has_own_forward,
    holds,
    is_replaced,
    put_back,
    replace,
)
from foo_ops.ops.linear_quantized import METHODS

# -------------------------------------------------------------------------------- apply and restore

# `apply` gives a model foo's operators, and `restore` undoes it.


Model = TypeVar("Model", bound=nn.Module)

REPLACEMENTS: dict[type[Replacement], tuple[set[str], ...]] = {
    **dict.fromkeys(ATTENTION_LAYERS, ({"attention", "rotary_embedding"},)),
    FooRotaryFooAttention: ({"attention", "rotary_embedding"},),
    FooAttention: ({"attention"},),
    FooRotaryAttention: ({"rotary_embedding"},),
    **dict.fromkeys(NORMS, ({"rms_norm"},)),
    **dict.fromkeys(LAYER_NORMS, ({"layer_norm"},)),
    **dict.fromkeys(LAYERS, ({"rms_norm"}, {"layer_norm"})),
    **dict.fromkeys((FooGatedMLP, FooPackedMLP), ({"mlp"},)),
    FooActivatedMLP: ({"mlp", "linear"},),
    FooExperts: ({"experts"},),
    **dict.fromkeys((FooEncoder, FooPackedModel), ({"packing", "attention"},)),
    **dict.fromkeys((FooLinear, FooConv1D), ({"linear"},)),
}
"""Arguments of `apply` that allow each replacement, one set of them or another.

A module gets the first replacement that fits.
"""

KINDS: dict[str, tuple[type[Replacement], ...]] = {
    "attention": (FooAttention,),
    "rms_norm": NORMS,
    "rotary_embedding": (FooRotaryAttention,),
    "mlp": (FooGatedMLP, FooPackedMLP, FooActivatedMLP),
    "experts": (FooExperts,),
    "linear": (FooLinear, FooConv1D),
    "quantize": (Quantized,),
    "fused_loss": (FooLanguageModel,),
    "layer_norm": LAYER_NORMS,
    "packing": (FooEncoder, FooPackedModel),
}
"""The classes that `replaced` counts."""


def apply(
    model: Model,
    *,
    attention: bool = True,
    rms_norm: bool = True,
    layer_norm: bool = True,
    rotary_embedding: bool = True,
    mlp: bool = True,
    experts: bool = True,
    linear: bool = True,
    loss: bool = True,
    fused_loss: bool = True,
    cache: bool | int = True,
    packing: bool | None = None,
    decode: bool = True,
    quantize: int | None = None,
    activations: int | None = None,
    keep_weights: bool = True,
    method: str = "nearest",
    prompts: Sequence[Prompt] | None = None,
) -> Model:
    """Let a model compute with foo's operators, and return it.

    Modules are recognised by their computation, not by their model: a norm, an MLP or a rotation
    must agree with foo's operator on random numbers. Modules that are not recognised stay as they
    are, and `left_alone` says why. Weights are not touched, so ``state_dict`` and
    ``save_pretrained`` are unchanged, and modules stay instances of their classes. The model can be
    trained, compiled, copied, pickled and moved to ``foo``, before and after. A second call changes
    nothing.

    Args:
        model: a model of transformers, or a module that contains such models.
        attention: attention layers call `foo_ops.attention` instead of PyTorch's ``sdpa`` or their
            model's ``eager_attention_forward``. The name of the implementation and the masks do not
            change. A call with other options, such as ``output_attentions``, goes to the original
            function.
        rms_norm: norms are `foo_ops.rms_norm`, also Gemma's, and `foo_ops.add_rms_norm` where a
            layer adds the residual first.
        layer_norm: `torch.nn.LayerNorm` and others that compute the same are `foo_ops.layer_norm`,
            and `foo_ops.add_layer_norm` where a layer adds the residual first.
        rotary_embedding: attention layers rotate query and key with `foo_ops.rotary_embedding`.
        mlp: the gates of SwiGLUs are `foo_ops.silu_mul`. Linear layers with a GELU, ReLU or silu
            behind them are `foo_ops.linear` with that activation, if ``linear`` is on.
        experts: the experts of mixtures are `foo_ops.moe_experts`, or two `foo_ops.grouped_linear`
            around a gate that it does not know.
        linear: `torch.nn.Linear`, and the ``Conv1D`` of GPT-2, are `foo_ops.linear`.
        loss: the losses of causal and masked language models are `foo_ops.softmax_cross_entropy`.
        fused_loss: in training with ``labels``, head and loss are `foo_ops.linear_cross_entropy`,
            and the output's ``logits`` are None, since they are never in memory. Otherwise the head
            is `foo_ops.linear`. Use ``fused_loss=False`` for a model whose logits are read in
            training.
        cache: caches passed to the model are written in place (`in_place_cache`). With 8, those
            that grow have 8 bits, half the bytes of bfloat16, for decoding long texts. Attention
            that is not foo's then receives dequantized values, and is slower.
        packing: encoders whose attention is ours compute no padding behind the sequences of a
            batch: the tokens of all of them are one row, by `foo_ops.attention_varlen`. Hidden
            states of padding are zeros then; so None allows it for models that do not return them:
            those of sentence-transformers, which pool them, and classifiers of sequences. Calls
            that need more of an encoder (hidden states of all layers, other masks, training) are
            computed with padding.
        decode: calls for one further token run as a program without Python, once three have been
            recorded. Results do not change. Whatever is unusual (gradients, hooks in the model,
            other outputs than logits) is computed as before, and a changed model is recorded again.
        quantize: 8 or 4: linear layers and experts keep a copy of their weights in 8 or 4 bits
            (`foo_ops.quantize_weight`; 4 bits in groups of 64, or 32) and compute with it, except
            in training. This is for decoding, whose time is that of reading weights. The weights
            stay, so the model takes more memory, not less, and ``state_dict`` has them. If a weight
            changes, its copy is renewed; a change of few elements through ``.data`` is noticed by
            ``model.eval()``.
        activations: 8: linear layers with weights of 8 or 4 bits, of ``quantize`` or of a
            checkpoint, round their inputs to 8 bits, and multiply integers: prompts are read faster
            than with bfloat16 weights. Each row has a scale, or each group if the weights have
            groups, and from 256 rows on then each section of 512 numbers (`foo_ops.linear_int8`);
            this is less exact than ``quantize`` alone. Experts, and weights of float8_e4m3fn, take
            inputs as they are.
        keep_weights: with False and ``quantize``, weights of linear layers and experts are freed
            once they are quantised: the model takes the memory of the integers, is for inference
            and for training adapters (peft), and cannot be restored. `save_quantized` writes it.
            ``Conv1D``, a head that is tied to the embedding, and experts that files do not have
            layer by layer keep theirs, beside a copy.
        method: of `foo_ops.quantize_weight`, for weights of 4 bits that are freed. "hqq" gives
            better ones and takes about ten times as long; such a model is not saved. "awq" runs
            the model on ``prompts`` and makes errors of the layers' outputs small; the scales of
            inputs become part of norms and of the layers before, wherever that leaves the model's
            function as it is, and such a model is saved as any other.
        prompts: for "awq", a few texts as they come in use, each as token ids (batch, tokens) or as
            a dict of keyword arguments for the model; some hundred tokens in all.

    Raises:
        TypeError: if model is not a module, or prompts are not a sequence of tensors and dicts.
        ValueError: for bits other than 8 and 4, or 8 for a cache or activations, keep_weights=False
            or activations without weights to quantise, a method that is not "nearest" without
            quantize=4 and keep_weights=False, "awq" without prompts or with fewer than 64 tokens,
            and prompts with another method.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=9, num_attention_heads=2))
        >>> model = foo_ops.integrations.transformers.apply(model)
        >>> replaced(model)["mlp"]
        1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply: model must be a torch.nn.Module, got {type(model).__name__}")
    check_bits(quantize)
    check_activations(model, quantize, activations)
    cache_bits = None if isinstance(cache, bool) else cache
    if cache_bits not in (None, 8):
        raise ValueError(f"apply: cache must be True, False or 8, got {cache}")
    if quantize is None and not keep_weights:
        raise ValueError("apply: keep_weights=False needs quantize=4 or 8, got quantize=None")
    check_method(quantize, keep_weights, method, prompts)
    flags = {
        "attention": attention,
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "rotary_embedding": rotary_embedding,
        "mlp": mlp,
        "experts": experts,
        "linear": linear,
        "packing": hides_padding(model) if packing is None else packing,
    }
    allowed = {name for name, flag in flags.items() if flag}
    if quantize is not None and not keep_weights:
        pack(model, quantize, method, prompts or ())
    for module in model.modules():
        if quantize is not None:
            quantize_layer(module, quantize)
        if activations is not None and rounds_input(module):
            vars(module)["foo_activations"] = activations
        change(module, allowed)
    for module in model.modules():
        if isinstance(module, FooJoined):
            module.join()
        if isinstance(module, Packing) and not module.is_safe():
            put_back(module)
    for part in pretrained(model):
        if loss:
            use_foo_loss(part)
        if fused_loss:
            use_linear_head(part)
        replace_language_model(part, fused_loss, decode)
        if cache and part.base_model is part and foo_cache.takes_cache(part):
            foo_cache.install(part, cache_bits)
    return model


def check_method(quantize: int | None, keep_weights: bool, method: str, prompts: Any) -> None:
    if method not in METHODS:
        raise ValueError(f"apply: method must be 'nearest', 'hqq' or 'awq', got {method!r}")
    if method != "nearest" and keep_weights:
        raise ValueError(f"apply: method={method!r} needs keep_weights=False, got True")
    if method != "nearest" and quantize != 4:
        raise ValueError(f"apply: method={method!r} needs quantize=4, got {quantize}")
    if method != "awq":
        if prompts is not None:
            given = type(prompts).__name__
            raise ValueError(f"apply: prompts must be None for method={method!r}, got a {given}")
        return
    if prompts is None or (isinstance(prompts, Sequence) and not prompts):
        raise ValueError(f"apply: method='awq' needs prompts, got {prompts}")
    is_list, kinds = isinstance(prompts, Sequence), (Tensor, Mapping)
    wrong = [it for it in prompts if not isinstance(it, kinds)] if is_list else [prompts]
    if wrong:
        raise TypeError(
            "apply: prompts must be a list of token ids (tensors) and of dicts, got "
            f"{type(wrong[0]).__name__}"
        )


def change(module: nn.Module, allowed: Iterable[str]) -> None:
    """Give a module the first replacement that fits, or one that does more than its present one."""
    if is_replaced(module):
        has = kinds_of(module) & {"attention", "rotary_embedding"}
        if not has or has >= {"attention", "rotary_embedding"} & set(allowed):
            return
        put_back(module)
        allowed = {*allowed, *has}
    elif isinstance(module, Replacement):
        return
    for replacement, alternatives in REPLACEMENTS.items():
        if any(needs <= set(allowed) for needs in alternatives) and replacement.recognises(module):
            replace(module, replacement)
            return


def restore(model: Model) -> Model:
    """Undo `apply`, and return the model; weights that it has not kept stay quantised.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3))
        >>> model = foo_ops.integrations.transformers.apply(model)
        >>> restore(model)[0].forward.__func__ is torch.nn.Linear.forward
        True
    """
    for module in model.modules():
        put_back(module)
        vars(module).pop("foo_activations", None)
    for part in pretrained(model):
        if vars(part).get("_loss_function") in LOSSES.values():
            del part._loss_function
        foo_cache.uninstall(part)
    return model


def kinds_of(module: nn.Module) -> set[str]:
    """Return the kinds of work that a module does with foo's operators."""
    if isinstance(module, (FooMxfp4Experts, FooPackedExperts, FooPackedLinear)):
        kinds = {"quantize"}
    elif not is_replaced(module):
        kinds = set()
    else:
        kinds = {kind for kind, classes in KINDS.items() if isinstance(module, classes)}
    if vars(module).get("_loss_function") in LOSSES.values():
        kinds.add("loss")
    if foo_cache.is_installed(module):
        kinds.add("cache")
    if isinstance(module, FooDecoder) and reason_of_no_graphs(module) is None:
        kinds.add("decode")
    return kinds


def replaced(model: nn.Module) -> dict[str, int]:
    """Return how many modules `apply` has changed, by the names of its arguments.

    Counts of 0 are left out; layers whose weights a checkpoint has in 4 or 8 bits count as
    quantised. `left_alone` says which modules stayed, and why.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> replaced(foo_ops.integrations.transformers.apply(model))
        {'linear': 1}
    """
    counts = Counter(kind for module in model.modules() for kind in kinds_of(module))
    return {kind: counts[kind] for kind in (*KINDS, "loss", "cache", "decode") if counts[kind]}


def pretrained(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models of transformers in a module, those that contain others first."""
    return [it for it in model.modules() if isinstance(it, PreTrainedModel)]


def use_foo_loss(model: PreTrainedModel) -> None:
    # A model without a head has a loss function too, and never calls it.
    if model.get_output_embeddings() is not None and model.loss_function in LOSSES:
        model.loss_function = LOSSES[model.loss_function]


# --------------------------------------------------------------------------------------- left alone

# Which modules of a model `apply` does not change, and why.


OTHER_FORWARD = "its forward has been replaced by another one"
NOT_ASKED = "not selected by the arguments of apply"


def left_alone(model: nn.Module) -> dict[str, str]:
    """Return the reasons why `apply` leaves modules unchanged, by module name.

    Covers attention layers, linear layers, norms, gated MLPs and experts. Modules for which foo_ops
    has no operator, such as embeddings and convolutions, are not listed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> left_alone(foo_ops.integrations.transformers.apply(model))
        {'1': 'foo_ops has no operator for BatchNorm1d'}
    """
    reasons = {name: reason_of(module) for name, module in model.named_modules()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def reason_of(module: nn.Module) -> str | None:
    if isinstance(module, FooDecoder):
        return reason_of_no_graphs(module)
    name = type(module).__name__
    if isinstance(module, FooPackedLinear):
        return None
    if isinstance(module, (nn.Linear, Conv1D)):
        return None if is_replaced(module) else reason_of_linear(module)
    if "Attention" in name and has_parameters(module) and not holds(module, "Attention"):
        return None if isinstance(module, FooAttention) else reason_of_attention(module)
    if "Norm" in name and isinstance(getattr(module, "weight", None), nn.Parameter):
        return None if is_replaced(module) else reason_of_norm(module)
    if is_replaced(module) or isinstance(module, (FooMxfp4Experts, FooPackedExperts)):
        return None
    if any(it.dim() == 3 for it in module._parameters.values() if it is not None):
        return reason_of_experts(module) if "Experts" in name else None
    if "MLP" in name and not holds(module, "MLP") and not holds(module, "Experts"):
        known = (FooGatedMLP, FooPackedMLP, FooActivatedMLP)
        return asked_or(module, known, "it computes no MLP that foo_ops knows")
    return None


def reason_of_experts(module: nn.Module) -> str:
    reason = "they do not compute what foo::moe_experts does"
    if not all(hasattr(module, flag) for flag in FLAGS):
        reason = "transformers' experts_implementation does not cover them"
    return asked_or(module, (FooExperts,), reason)


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def asked_or(module: nn.Module, known: tuple[type[Replacement], ...], reason: str) -> str:
    """Return the reason, unless other arguments of `apply` would replace the module."""
    if has_own_forward(module):
        return OTHER_FORWARD
    return NOT_ASKED if any(it.recognises(module) for it in known) else reason


def reason_of_linear(module: Any) -> str:
    weight = module.weight
    reason = f"{type(module).__name__} has a forward of its own"
    if type(weight) not in WEIGHT_TYPES:
        reason = f"its weight is a {type(weight).__name__}"
    elif not weight.is_floating_point():
        reason = f"its weight is {weight.dtype}"
    return asked_or(module, (FooLinear, FooConv1D), reason)


def reason_of_norm(module: nn.Module) -> str:
    name = type(module).__name__
    if type(module).__module__.startswith("torch.") and not isinstance(
        module, (nn.LayerNorm, nn.RMSNorm)
    ):
        return f"foo_ops has no operator for {name}"
    known = "foo::layer_norm" if "LayerNorm" in name else "foo::rms_norm"
    return asked_or(module, (*NORMS, *LAYER_NORMS), f"{name} does not compute what {known} does")


def reason_of_attention(module: Any) -> str:
    if has_own_forward(module):
        return OTHER_FORWARD
    if not looks_up(module):
        return "its forward does not look attention up in transformers' table"
    if FooAttention.recognises(module):
        return NOT_ASKED
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if own_function(module) is None or name not in (None, "eager"):
        return f"foo::attention does not replace its implementation {name!r}"
    return f"its {EAGER} does not compute what foo::attention does"
