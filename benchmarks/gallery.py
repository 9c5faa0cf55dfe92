"""Draw the masks of docs/flex_attention.md, from the code that stands there.

``python -m benchmarks.gallery`` writes the pictures into docs/images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.publish import IMAGES, REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "flex_attention.md"
VARIANT = re.compile(r"^### (.+?)$.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LENGTH = 64
PIXELS = 4
"""Of a pair of a query and a key, in either direction."""
COLORS = "viridis_r"
LIGHTEST = 0.25

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Variant:
    """A heading of the gallery, and the functions of its code."""

    title: str
    score_mod: Function | None
    mask_mod: Function | None

    @property
    def path(self) -> str:
        return f"flex_{self.title.lower().replace(' ', '_')}.png"

    def scores(self) -> Tensor:
        """Return what the scores 0 of the first row and head become; -inf where a key is hidden."""
        zero = torch.zeros((), dtype=torch.int64)
        positions = torch.arange(LENGTH)
        places = (zero, zero, positions[:, None], positions)
        scores = torch.zeros(LENGTH, LENGTH)
        if self.score_mod is not None:
            scores = self.score_mod(scores, *places).detach()
        return scores if self.mask_mod is None else scores.where(self.mask_mod(*places), -torch.inf)


def variants(document: Path = DOCUMENT) -> Iterator[Variant]:
    """Run the code of each variant, and find its functions."""
    for title, code in VARIANT.findall(document.read_text()):
        names: dict[str, Any] = {}
        exec(code, names)
        yield Variant(title, names.get("score_mod"), names.get("mask_mod"))


def picture(scores: Tensor) -> Any:
    """Return the pixels, (height, width, 3) from 0 to 1: hidden pairs white, high scores dark."""
    from matplotlib import colormaps

    seen = scores.isfinite()
    shown = scores[seen]
    span = (shown.max() - shown.min()).clamp(min=1e-6)
    # Where all scores are alike, all are high.
    heights = 1 - (shown.max() - scores) / span * (1 - LIGHTEST)
    pixels = colormaps[COLORS](heights.nan_to_num(neginf=0.0).numpy())[..., :3]
    pixels[~seen.numpy()] = 1.0
    return np.kron(pixels, np.ones((PIXELS, PIXELS, 1)))


def main() -> None:
    from matplotlib.image import imsave

    for variant in variants():
        path = IMAGES / variant.path
        # Without the version of matplotlib: the same picture is the same file.
        imsave(path, picture(variant.scores()), metadata={"Software": ""})
        print(path.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
