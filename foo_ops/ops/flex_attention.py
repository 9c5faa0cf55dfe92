"""foo::flex_attention computes attention whose scores a user's function changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C, library
from foo_ops.ops.arguments import compute_type

TAGS = (torch.Tag.pt2_compliant_tag,)

MASK = (
    "Tensor? kv_num_blocks=None, Tensor? kv_indices=None, Tensor? full_kv_num_blocks=None, "
    "Tensor? full_kv_indices=None"
)
OPTIONS = (
    'str score_mod="", str mask_mod="", str backward="", float[] numbers=[], int[] integers=[], '
    "float? scale=None, int query_block=128, int key_block=128"
)

library.define(
    "foo::flex_attention",
    f"(Tensor query, Tensor key, Tensor value, Tensor[] captured, {MASK}, *, {OPTIONS}) "
    "-> (Tensor output, Tensor logsumexp)",
    tags=TAGS,
)

# The gradient of a captured tensor has size 0 where it is not asked for.
library.define(
    "foo::flex_attention_backward",
    "(Tensor grad_output, Tensor grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    f"Tensor[] captured, Tensor output, Tensor logsumexp, {MASK}, *, "
    f"bool[] captured_requires_grad, {OPTIONS}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grad_captured)",
    tags=TAGS,
)
