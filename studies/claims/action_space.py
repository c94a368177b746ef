"""The number of tokens that a model effectively chooses from, and the probability of the most likely ones, by position.

The claim is that of Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740, section 3). A fine-tuned model's probability lies on
few tokens, so that the action space of 10^4 to 10^5 tokens is only nominal. It is even smaller after the first token. They
conclude that REINFORCE needs no critic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from psigrad.config import Data, EvalConfig, Evaluation, Model, Run
from psigrad.errors import UserError
from psigrad.intervals import Interval, over_seeds
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.recipes import evaluate
from psigrad.records.report.plots import COLOURS
from psigrad_extras import demo
from studies import drawing, trials
from studies.settings import SpaceSettings
from studies.trials import ClaimVerdict, Trial

TOP = (1, 4, 16)
PLACES = 6
"""The number of places of a completion with separate rows. The last row is of all later ones."""
FEW = 16
"""The number of most likely tokens for the claim. Their mass after the first token must exceed `MASS`."""
MASS = 0.9


@dataclass(frozen=True)
class PlaceRow:
    """The figures of one model at one position of its completions."""

    model: str
    place: int
    """The place, from 1."""
    count: int
    mass: tuple[Interval, ...]
    """The mass of the `TOP` most likely tokens; intervals are over prompts."""
    entropy: Interval
    """The entropy in nats."""
    effective: float
    """exp(mean entropy): the number of equally likely tokens with that entropy."""


@dataclass(frozen=True)
class SpaceResult:
    """The results of `run`."""

    settings: SpaceSettings
    vocabulary: dict[str, int]
    rows: tuple[PlaceRow, ...]
    findings: tuple[ClaimVerdict, ...]


def check(s: SpaceSettings) -> None:
    """Raise an error for invalid settings."""
    trials.check(s)
    if bool(s.model) != bool(s.dataset):
        raise UserError("Only one of model and dataset was given; give both or neither.")
    if len({label(path) for path in s.model}) < len(s.model):
        raise UserError(f"Two of the models {', '.join(s.model)} have the same name; rename a folder.")


def run(s: SpaceSettings) -> SpaceResult:
    """Compare the fine-tuned model, the same model after RLOO and before any training, and the requested model."""
    where = trials.files(s)
    trials.run_all(s, "action_space", [Trial("RLOO", 0, "rloo", trials.online(s, where, "rloo", reward=("exact",)))])
    models = {
        "untrained": where["base"],
        "after SFT": where["model"],
        "after RLOO": trials.place(s, "action_space", "RLOO", 0) / "model",
    }
    found = {name: masses(str(path), str(where["held_out"]), s.held_out) for name, path in models.items()}
    for path in s.model:
        found[label(path)] = masses(convert_to_folder(path), s.dataset, s.held_out, longest=32)
    rows = tuple(row for name, (_, places) in found.items() for row in summary(name, places))
    findings = []
    for name, (_, places) in found.items():
        if name == "untrained":
            continue
        later = [mass[TOP.index(FEW)] for k, place in places.items() if k > 1 for mass, _ in place]
        claim = f"{name}: more than {MASS:.0%} of the probability is on {FEW} tokens after the first"
        findings.append(trials.compare_pairs(claim, f"mass − {MASS:g}, over tokens", later, [MASS] * len(later)))
        pairs = list(zip(places[1], places[2], strict=False))
        claim = f"{name}: the second token is drawn from fewer than the first"
        firsts, seconds = ([pair[i][1] for pair in pairs] for i in (0, 1))
        findings.append(trials.compare_pairs(claim, "entropy: first token > second, paired by prompt", firsts, seconds))
    return SpaceResult(s, {name: size for name, (size, _) in found.items()}, rows, tuple(findings))


def label(path: str) -> str:
    """Return the name of a model: its folder, or that of its run."""
    place = Path(path)
    return place.parent.name if place.name == "model" else place.stem if place.suffix == ".gguf" else place.name


def masses(
    path: str, dataset: str, prompts: int, *, longest: int = 12
) -> tuple[int, dict[int, list[tuple[tuple[float, ...], float]]]]:
    """Return the vocabulary size, and by position a pair for each completion: (mass of the `TOP` most likely tokens, entropy).

    Both are computed from the model's distribution at temperature 1.
    """
    asked = EvalConfig(
        model=Model(path=path),
        data=Data(dataset=dataset),
        sampling=replace(demo.SAMPLING, max_completion_length=longest),
        evaluation=Evaluation(eval_prompts=prompts),
        run=Run(threads=1),
    )
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    places: dict[int, list[tuple[tuple[float, ...], float]]] = {}
    with torch.no_grad():
        for one in evaluate.sample_and_score(asked, False).trajectories:
            ids = torch.tensor([[*one.prompt_ids, *one.completion.ids]])
            logp = network(ids).logits[0, len(one.prompt_ids) - 1 : -1].float().log_softmax(-1)
            ordered = logp.exp().sort(descending=True).values.cumsum(-1)
            entropy = -(logp.exp() * logp).nansum(-1)
            for t in range(len(one.completion.ids)):
                mass = tuple(float(ordered[t, min(k, ordered.shape[1]) - 1]) for k in TOP)
                places.setdefault(min(t + 1, PLACES), []).append((mass, float(entropy[t])))
    return int(network.config.vocab_size), places


def summary(name: str, places: Mapping[int, list[tuple[tuple[float, ...], float]]]) -> Iterator[PlaceRow]:
    """Yield a row for each position."""
    for place, found in sorted(places.items()):
        entropy = over_seeds(h for _, h in found)
        mass = tuple(over_seeds(m[i] for m, _ in found) for i in range(len(TOP)))
        yield PlaceRow(name, place, len(found), mass, entropy, math.exp(entropy.mean))


def tables(result: SpaceResult) -> drawing.Printed:
    """Yield one row for each model and position, then the claims."""
    table = drawing.new_table(
        "The effective action space", "", "token", "count", *(f"top {k}" for k in TOP), "entropy", "effective"
    )
    last = ""
    for row in result.rows:
        shown = row.model if row.model != last else ""
        last = row.model
        place = str(row.place) if row.place < PLACES else f"{PLACES}+"
        figures = (*(f"{m.mean:.3f}" for m in row.mass), drawing.around(row.entropy, ".2f"), f"{row.effective:.1f}")
        table.add_row(shown, place, str(row.count), *figures)
    yield table
    sizes = ", ".join(f"{name} {size:,}" for name, size in result.vocabulary.items())
    yield drawing.note(
        f"tokens in all: {sizes}",
        "top k: probability of the k likeliest tokens; entropy in nats, 95 % interval over completions",
        "effective: exp(entropy), as many equally likely tokens",
    )
    yield trials.findings_text(result.findings)


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot the mass of the most likely token and the effective number of tokens, by position."""
    figure, (left, right) = drawing.new_figure(9.5, 3.4, 1, 2)
    for name, colour in zip(dict.fromkeys(row["model"] for row in found["rows"]), COLOURS, strict=False):
        rows = [row for row in found["rows"] if row["model"] == name]
        style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.6, "label": name}
        left.plot([row["place"] for row in rows], [row["mass"][0][0] for row in rows], **style)
        right.plot([row["place"] for row in rows], [row["effective"] for row in rows], **style)
    for axes, title in ((left, "Probability of the likeliest token"), (right, "Effective number of tokens")):
        drawing.tidy(axes, title, "y", "position in the completion (6: sixth and later)", legend=axes is left)
    left.set_ylim(0, 1.05)
    right.set_yscale("log")
    return drawing.save(figure, path)
