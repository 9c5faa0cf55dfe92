"""Draws the masks in docs/flex_attention.md, with the code printed there.

``python -m benchmarks.gallery`` writes the pictures into docs/images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.publish import GALLERY, IMAGES, REPOSITORY

VARIANT = re.compile(r"^### (.+?)$.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LENGTH = 64
ASSIGNED_LENGTH = re.compile(r"^length = \d+$", re.MULTILINE)
PIXELS = 4
"""Width and height of a pair of a query and a key."""
COLORS = "viridis_r"
LIGHTEST = 0.25


@dataclass(frozen=True)
class Variant:
    """A heading of the gallery, and its code."""

    title: str
    code: str

    def run(self, length: int) -> dict[str, Any]:
        """Run the code for sequences of this length, and return what it defines."""
        code, found = ASSIGNED_LENGTH.subn(f"length = {length}", self.code)
        if found != 1:
            raise ValueError(f"the code of {self.title} must set `length = {LENGTH}`, once")
        names: dict[str, Any] = {}
        exec(code, names)
        return names

    @property
    def path(self) -> str:
        return f"flex_{self.title.lower().replace(' ', '_')}.png"

    def scores(self) -> Tensor:
        """Apply the variant to scores of 0, batch 0 and head 0; -inf where a key is hidden."""
        zero = torch.zeros((), dtype=torch.int64)
        positions = torch.arange(LENGTH)
        places = (zero, zero, positions[:, None], positions)
        scores = torch.zeros(LENGTH, LENGTH)
        names = self.run(LENGTH)
        if "score_mod" in names:
            scores = names["score_mod"](scores, *places).detach()
        if "mask_mod" not in names:
            return scores
        return scores.where(names["mask_mod"](*places), -torch.inf)


def variants(document: Path = GALLERY) -> Iterator[Variant]:
    for title, code in VARIANT.findall(document.read_text()):
        yield Variant(title, code)


def picture(scores: Tensor) -> Any:
    """Return the pixels, (height, width, 3) from 0 to 1: hidden pairs white, high scores dark."""
    from matplotlib import colormaps

    seen = scores.isfinite()
    shown = scores[seen]
    span = (shown.max() - shown.min()).clamp(min=1e-6)
    # If all scores are equal, all are drawn as high.
    heights = 1 - (shown.max() - scores) / span * (1 - LIGHTEST)
    pixels = colormaps[COLORS](heights.nan_to_num(neginf=0.0).numpy())[..., :3]
    pixels[~seen.numpy()] = 1.0
    return np.kron(pixels, np.ones((PIXELS, PIXELS, 1)))


def main() -> None:
    from matplotlib.image import imsave

    for variant in variants():
        path = IMAGES / variant.path
        # Omit matplotlib's version, so that the same picture is the same file.
        imsave(path, picture(variant.scores()), metadata={"Software": ""})
        print(path.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
