"""Small models are compared with themselves after `apply`, and differences are found.

``make test-models`` compares all of them, and each part of ``make test-all`` some.
"""

import pytest
import torch
from models import check_all, is_wrong, line_of
from support.model_zoo import table
from support.model_zoo.checks import DiffersError, compare, compared
from support.model_zoo.classes import classes_of
from support.model_zoo.configurations import WINDOW, small_config
from support.model_zoo.models import inputs_of, make
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from foo_ops.integrations import transformers as integration


def test_models_are_checked_in_a_process():
    """An unknown model type gives a row, too, and the next one is checked."""
    rows = list(check_all(["no such type", "llama"], workers=1))
    assert [row["type"] for row in rows] == ["no such type", "llama", "llama"]
    assert [row["verdict"] for row in rows] == ["not made", "agrees", "agrees"]
    assert [line_of(row) for row in rows if is_wrong(row)] == []


def test_windows_are_shorter_than_sequences():
    """A small model has a layer of each kind that the large one has."""
    config = small_config("gemma3_text")
    assert config.sliding_window == WINDOW
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_wrong_mask_is_seen(monkeypatch):
    """A model whose attention looks ahead after `apply` differs in every check."""

    def looks_ahead(model):
        model.set_attn_implementation("looks ahead")
        return model

    def attend(module, query, key, value, mask, **options):
        options["is_causal"] = False
        return sdpa_attention_forward(module, query, key, value, None, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "looks ahead", attend)
    monkeypatch.setattr(integration, "apply", looks_ahead)
    made = make("llama", classes_of("llama")[1])
    row = compared(made, {side: inputs_of(made, side) for side in (None, "left", "right")})
    assert row["verdict"] == "differs"
    assert [name for name, it in row["checks"].items() if not it.startswith("differs")] == []


def results(**changes):
    exact = {"logits": torch.linspace(-1, 1, 50, dtype=torch.float64)}
    near = {name: it.float() for name, it in exact.items()}
    return {**near, **changes}, near, exact


@pytest.mark.parametrize(
    "ours",
    [
        {"logits": torch.linspace(-1, 1, 50) * 1.001},
        {"logits": torch.full((50,), torch.nan)},
        {"logits": torch.linspace(-1, 1, 50)[1:]},
        {"gradient of weight": torch.ones(2)},
    ],
    ids=["off", "not finite", "shape", "one more"],
)
def test_differences_are_seen(ours):
    compare(*results())
    with pytest.raises(DiffersError):
        compare(*results(**ours))


def test_table(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    made = {"type": "bert", "class": "BertModel", "verdict": "agrees", "modality": "text"}
    made |= {
        "replaced": {"linear": 13},
        "left alone": {"encoder.norm": "no"},
        "checks": {},
        "reason": "",
    }
    other = {"type": "timm", "class": "", "verdict": "not made", "reason": "no timm"}
    table.publish([other, made], page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| `bert` | BertModel | text | linear 13 | yes | norm: no |" in text
    assert "- `timm`: no timm" in text
    assert "old" not in text
