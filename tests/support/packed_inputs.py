"""Small packed rows: prompts with completions, completions that branch off before their prompt ends, and texts alone; and an
oracle for a kernel that attends piece by piece.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from psigrad.language.models.packing import Groups, Rows

GROUPS = Groups(
    prompts=((3, 1, 2), (2, 5, 4, 1, 3), (7,)), completions=(((4, 2, 1), (1,)), ((3, 3), (2, 1, 4, 5), ()), ((1, 2, 3, 4, 5),))
)
BRANCHES = replace(GROUPS, starts=((1, 3), (5, 2, 4), (1,)))
ROWS = Rows([[1, 2, 3, 4], [3, 4, 5, 6, 7], [8, 9]], [[0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1]])


def draw(rows, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, rows, 8, generator=generator, **kwargs) for heads in (4, 2, 2)]


def pieces_of(q, k, ends_q, ends_k, longest_q, longest_k):
    """(queries, keys) of each piece; what is said of all of them must be so."""
    cuts_q, cuts_k = ends_q.tolist(), ends_k.tolist()
    assert ends_q.dtype == ends_k.dtype == torch.int32
    assert (cuts_q[0], cuts_k[0], cuts_q[-1], cuts_k[-1]) == (0, 0, len(q), len(k))
    sizes = [(b - a, d - c) for a, b, c, d in zip(cuts_q, cuts_q[1:], cuts_k, cuts_k[1:], strict=False)]
    assert (longest_q, longest_k) == (max(n for n, _ in sizes), max(m for _, m in sizes))
    return sizes


def oracle(q, k, v, ends_q, ends_k, longest_q, longest_k, scale, window):
    """Piece by piece; the last query stands at the last key."""
    out, heads = [], q.shape[1]
    sizes = pieces_of(q, k, ends_q, ends_k, longest_q, longest_k)
    split = [x.split(list(n)) for x, n in zip((q, k, v), (*zip(*sizes, strict=True), [m for _, m in sizes]), strict=True)]
    for (n, m), one, keys, values in zip(sizes, *split, strict=True):
        place = q.new_ones(m, dtype=torch.long).cumsum(0)
        distance = place[m - n :, None] - place
        mask = (distance >= 0) & (distance < (window or m + 1))
        views = [x.transpose(0, 1)[None] for x in (one, keys, values)]
        views[1:] = [x.repeat_interleave(heads // x.shape[1], 1) for x in views[1:]]
        out.append(F.scaled_dot_product_attention(*views, attn_mask=mask, scale=scale)[0].transpose(0, 1))
    return torch.cat(out)
