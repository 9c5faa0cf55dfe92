"""foo_ops in the models of Hugging Face transformers.

`apply` replaces the modules of a model whose work foo's operators do:

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=9, num_attention_heads=2))
    >>> model = foo_ops.integrations.transformers.apply(model)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 9])

Attention alone needs only the import of this package, which registers ``"foo"`` as an
implementation: ``from_pretrained(path, attn_implementation="foo")``, or for an existing model,

    >>> restore(model).set_attn_implementation("foo")

Experts of mixtures are chosen likewise, by ``experts_implementation="foo"``.

Checkpoints with weights of 4 and 8 bits (AWQ, GPTQ, NF4, torchao) and with experts of MXFP4
stay so on CPUs. `save_quantized` writes a model that `apply` has quantised.

``"foo_flex"`` is another implementation of attention, by `foo_ops.flex_attention`: there masks of
any pattern are functions, and never in memory.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "foo_ops.integrations.transformers needs transformers: pip install foo_ops[transformers]"
    ) from error

from foo_ops.integrations.transformers.attention import (
    BOUNDS,
    FLEX_NAME,
    NAME,
    UNSUPPORTED,
    FunctionMask,
    foo_attention_forward,
    foo_flex_forward,
    foo_flex_mask,
    foo_mask,
    register,
    register_flex,
)
from foo_ops.integrations.transformers.cache import in_place_cache
from foo_ops.integrations.transformers.checkpoints import register_checkpoints
from foo_ops.integrations.transformers.experts import foo_experts_forward, register_experts
from foo_ops.integrations.transformers.gguf import register_gguf
from foo_ops.integrations.transformers.models import apply, left_alone, replaced, restore
from foo_ops.integrations.transformers.mxfp4 import register_mxfp4
from foo_ops.integrations.transformers.packing import save_quantized

__all__ = [
    "BOUNDS",
    "FLEX_NAME",
    "NAME",
    "UNSUPPORTED",
    "FunctionMask",
    "apply",
    "foo_attention_forward",
    "foo_experts_forward",
    "foo_flex_forward",
    "foo_flex_mask",
    "foo_mask",
    "in_place_cache",
    "left_alone",
    "register",
    "register_checkpoints",
    "register_experts",
    "register_flex",
    "register_gguf",
    "register_mxfp4",
    "replaced",
    "restore",
    "save_quantized",
]

register()
register_checkpoints()
register_experts()
register_flex()
register_gguf()
register_mxfp4()
