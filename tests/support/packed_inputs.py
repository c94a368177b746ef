"""Small packed rows: prompts with completions, completions that branch off before their prompt ends, and texts alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from psigrad.language.models.packing import Groups, Rows

GROUPS = Groups(
    prompts=((3, 1, 2), (2, 5, 4, 1, 3), (7,)), completions=(((4, 2, 1), (1,)), ((3, 3), (2, 1, 4, 5), ()), ((1, 2, 3, 4, 5),))
)
BRANCHES = replace(GROUPS, starts=((1, 3), (5, 2, 4), (1,)))
ROWS = Rows([[1, 2, 3, 4], [3, 4, 5, 6, 7], [8, 9]], [[0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1]])


def draw(rows, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, rows, 8, generator=generator, **kwargs) for heads in (4, 2, 2)]
