"""What the page of docs/live/grpo computes, computed by psigrad: the same model, numbers, steps and samples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from psigrad import seeds
from psigrad.config import Optim
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.models.packing import Groups
from psigrad.objective.batch import Batch, PolicyOutputs, terminal
from psigrad.objective.catalog import GRPO
from psigrad.objective.parts.ratio import KL
from psigrad.objective.parts.surrogate import clip
from psigrad.optim import Optimizer

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY, COLUMNS = 2, 64, 192, 4, 12, 16
WEIGHTS, DEMONSTRATIONS, CARE, PROMPTS, COMPLETIONS = range(5)
DIGITS, LONGEST, ARROW, END, SIGNS = 6, 10, 10, 11, "0123456789>."
STEP_COMPLETIONS, STEP_DEMONSTRATIONS = 128, 64
OPTIM = Optim(adam_beta2=0.99, adam_epsilon=1e-5, weight_decay=0.0, max_grad_norm=1.0)
TENSORS = [
    ("embed", VOCABULARY, WIDTH),
    *(
        (f"{name}.{layer}", rows, columns)
        for layer in range(LAYERS)
        for name, rows, columns in (
            *(("norm1", 1, WIDTH), ("qkv", WIDTH, 3 * WIDTH), ("out", WIDTH, WIDTH)),
            *(("norm2", 1, WIDTH), ("mlp", WIDTH, 2 * HIDDEN), ("down", HIDDEN, WIDTH)),
        )
    ),
    ("norm", 1, WIDTH),
    ("head", WIDTH, COLUMNS),
]
"""The page's tensors, one after the other, as [in, out]."""


def uniform(seed: int, purpose: int, index: int, counters: Sequence[int]) -> np.ndarray:
    """Numbers of a stream."""
    stream = np.full(len(counters), (seed << 48) | (purpose << 40) | index, dtype=np.uint64)
    return seeds.uniform(stream, np.array(counters))


def fresh_weights(seed: int) -> np.ndarray:
    """All weights in the order of `TENSORS`."""
    found = []
    for index, (name, rows, columns) in enumerate(TENSORS):
        u = uniform(seed, WEIGHTS, index, range(rows * columns)).reshape(rows, columns)
        tensor = np.ones_like(u) if rows == 1 else (3 / (1 if name == "embed" else rows)) ** 0.5 * (2 * u - 1)
        if name == "head":
            tensor[:, VOCABULARY:] = 0
        found.append(tensor.ravel())
    return np.concatenate(found).astype(np.float32)


def network(weights: np.ndarray) -> LanguageModel:
    """The page's weights as a Llama."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=END,
    )
    sizes = np.cumsum([0, *(rows * columns for _, rows, columns in TENSORS)])
    given = {
        name: torch.from_numpy(weights[at : at + rows * columns].reshape(rows, columns))
        for at, (name, rows, columns) in zip(sizes[:-1], TENSORS, strict=True)
    }
    state = {"model.embed_tokens.weight": given["embed"], "model.norm.weight": given["norm"][0]}
    state["lm_head.weight"] = given["head"][:, :VOCABULARY].T
    for layer in range(LAYERS):
        own = {name: given[f"{name}.{layer}"] for name in ("norm1", "qkv", "out", "norm2", "mlp", "down")}
        q, k, v = own["qkv"].T.chunk(3)
        gate, up = own["mlp"].T.chunk(2)
        matrices = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": own["out"].T}
        matrices |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": own["down"].T}
        matrices |= {"input_layernorm": own["norm1"][0], "post_attention_layernorm": own["norm2"][0]}
        state |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in matrices.items()}
    llama = LlamaForCausalLM(config)
    llama.load_state_dict({name: tensor.contiguous() for name, tensor in state.items()})
    words = Tokenizer(models.WordLevel({sign: i for i, sign in enumerate(SIGNS)}, unk_token="."))
    return prepare(llama, PreTrainedTokenizerFast(tokenizer_object=words, eos_token=".", pad_token="."))


def prompt(seed: int, purpose: int, index: int) -> list[int]:
    """A prompt of those that are trained on."""
    counter = 0
    while True:
        number = int(uniform(seed, purpose, index, [counter])[0] * 10**DIGITS)
        if number * 2654435761 % 2**32 >= 2**32 / 20:
            return [*map(int, f"{number:06d}"), ARROW]
        counter += 1


def answer(asked: Sequence[int]) -> list[int]:
    """The digits in order."""
    return [*sorted(asked[:DIGITS]), END]


def demonstrated(seed: int, index: int, asked: Sequence[int], wrong: float) -> list[int]:
    """An answer, careless in `wrong` of the cases."""
    shown = answer(asked)
    places = [i for i in range(DIGITS - 1) if shown[i] != shown[i + 1]]
    careless, where = uniform(seed, CARE, index, [0, 1])
    if places and careless < wrong:
        at = places[int(where * len(places))]
        shown[at], shown[at + 1] = shown[at + 1], shown[at]
    return shown


def reward(name: str, asked: Sequence[int], given: Sequence[int]) -> float:
    """What a completion earns."""
    right = answer(asked)
    if name == "right":
        return float(list(given) == right)
    if name == "places":
        return sum(a == b for a, b in zip(given, right, strict=False)) / (DIGITS + 1)
    return sum(a <= b < ARROW for a, b in itertools.pairwise(given)) / (LONGEST - 1)


class Learner:
    """The page's `Learner`, on psigrad's model, objective and optimiser."""

    def __init__(self, seed: int, weights: np.ndarray) -> None:
        self.seed, self.steps, self.tuned = seed, 0, 0
        self.model, self.reference = network(weights), network(weights)
        self.optimizer = Optimizer(self.model.trainable(), OPTIM)

    def fine_tune(self, *, wrong: float = 0.6, rate: float = 3e-3, warmup: int = 20) -> dict[str, float]:
        """One step on demonstrations."""
        index = [self.tuned * STEP_DEMONSTRATIONS + i for i in range(STEP_DEMONSTRATIONS)]
        prompts = [prompt(self.seed, DEMONSTRATIONS, i) for i in index]
        shown = [demonstrated(self.seed, i, asked, wrong) for i, asked in zip(index, prompts, strict=True)]
        losses: list[float] = []

        def loss() -> torch.Tensor:
            logp = self.model.evaluate(Groups(prompts, [[given] for given in shown])).logp
            value = -logp.sum() / sum(map(len, shown))
            losses.append(float(value.detach()))
            return value

        self.tuned += 1
        norm = self.optimizer.step([loss], rate * min(1.0, self.tuned / warmup))
        assert norm is not None
        return {"step": self.tuned, "loss": losses[0], "norm": norm}

    def sample(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """A completion for each prompt by the page's streams."""
        completions: list[list[int]] = [[] for _ in prompts]
        for t in range(LONGEST):
            rows = torch.tensor([[*p, *c, *[END] * (t - len(c))] for p, c in zip(prompts, completions, strict=True)])
            with torch.no_grad():
                logits = self.model.network(input_ids=rows).logits[:, -1]
            below = logits.double().softmax(-1).cumsum(-1).numpy()
            for b, given in enumerate(completions):
                if END not in given:
                    drawn = uniform(self.seed, COMPLETIONS, self.steps * STEP_COMPLETIONS + b, [t])[0]
                    given.append(min(int((below[b] <= drawn).sum()), VOCABULARY - 1))
        return completions

    def reinforce(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """One step of GRPO: rewards, advantages, each update's figures, and the tokens that were clipped last."""
        group = settings["group"]
        asked = [prompt(self.seed, PROMPTS, self.steps * STEP_COMPLETIONS + g) for g in range(STEP_COMPLETIONS // group)]
        prompts = [one for one in asked for _ in range(group)]
        completions = self.sample(prompts)
        groups = Groups(asked, [completions[g * group : (g + 1) * group] for g in range(len(asked))])
        with torch.no_grad():
            old, reference = self.model.evaluate(groups).logp, self.reference.evaluate(groups).logp
        mask = torch.arange(old.shape[1]) < torch.tensor([[len(given)] for given in completions])
        earned = [reward(settings["reward"], p, c) for p, c in zip(prompts, completions, strict=True)]
        batch = Batch(
            mask=mask,
            reward=terminal(torch.tensor(earned), mask),
            logp_old=old,
            logp_ref=reference,
            group=torch.arange(len(prompts)) // group,
        )
        # with its figures but without its force where β is 0
        method = replace(GRPO, surrogate=clip(settings["clip"], settings["clip"]), kl=KL("loss", "k3", settings["kl"] or 1e-12))
        state = method.initial_state()
        prepared = method.prepare(batch, state)
        totals = method.totals(replace(prepared, needs_gradient=torch.ones_like(prepared.keep)))
        everyone = replace(prepared, needs_gradient=torch.ones_like(prepared.keep))
        updates, outputs = [], []

        def loss() -> torch.Tensor:
            outputs.append(self.model.evaluate(groups).logp)
            found = method.loss(everyone, PolicyOutputs(logp=outputs[-1]), totals, state)
            updates.append({"loss": float(found.value.detach()), "kl": float(found.terms["kl"])})
            updates[-1]["clipped"] = float(found.terms["clip_ratio/region_mean"])
            return found.value

        for _ in range(settings["passes"]):
            norm = self.optimizer.step([loss], settings["rate"])
            assert norm is not None
            updates[-1]["norm"] = norm
        self.steps += 1
        ratio = (outputs[-1].detach() - old).exp()
        advantage = prepared.advantage
        hit = ((ratio > 1 + settings["clip"]) & (advantage > 0)).int() - ((ratio < 1 - settings["clip"]) & (advantage < 0)).int()
        return {
            "texts": ["".join(SIGNS[token] for token in given) for given in completions],
            "rewards": earned,
            "advantages": advantage[:, 0].tolist(),
            "logp": [row[: len(given)] for row, given in zip(old.tolist(), completions, strict=True)],
            "ratio": [row[: len(given)] for row, given in zip(ratio.tolist(), completions, strict=True)],
            "clipped": [row[: len(given)] for row, given in zip(hit.tolist(), completions, strict=True)],
            "updates": updates,
        }
