"""What autograd keeps of a forward pass, counted on the tensors themselves."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch

from psigrad.language.models import language_model
from psigrad.language.models.packing import Groups


def running(vocabulary: int, prompts: int, members: int, prompt: int, length: int) -> Groups:
    """Prompts and completions whose tokens are as unlike as the vocabulary allows: a plan does not count on equal ones."""
    ids = itertools.cycle(range(vocabulary))
    given = [list(itertools.islice(ids, prompt)) for _ in range(prompts)]
    return Groups(given, [[list(itertools.islice(ids, length)) for _ in range(members)] for _ in range(prompts)])


def kept_by_autograd(hf, prompts: int, members: int, prompt: int, length: int) -> tuple[int, int, int]:
    """(bytes, packed tokens, prompt tokens carried) of a forward pass to the last hidden state."""
    model = language_model.prepare(hf, SimpleNamespace(bos_token_id=None, eos_token_id=0))
    own = {t.untyped_storage().data_ptr() for t in (*hf.parameters(), *hf.buffers())}
    held: list[torch.Tensor] = []

    def keep(tensor):
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.stats(running(hf.config.vocab_size, prompts, members, prompt, length))
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    total = sum(size for place, size in sizes.items() if place not in own)
    return total, prompts * (prompt + members * (length - 1)), prompts * members * prompt
