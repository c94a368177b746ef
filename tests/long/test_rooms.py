"""The example in which small models learn a tool over several turns, each in the tongue of its family."""

from __future__ import annotations

import itertools
import json
import random
import sys
from datetime import date
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from psigrad.language.data.chat.rendering import set_render_settings
from psigrad.language.data.dataset_rows import validate
from psigrad.language.data.templates import examples, prompt_ids, stop_token_ids
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import Episodes, play
from psigrad.language.episodes.tools import ToolBoxes, call_form_of
from psigrad.language.rollout.types import Completion, Sampler, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import rooms


class Careful(random.Random):
    """Whose demonstrations are right."""

    def random(self) -> float:
        return 0.99


class Reciting(Sampler):
    """Says one turn after the other."""

    def __init__(self, turns):
        self.turns = iter(turns)

    def steps(self, requests, params, cache=None):
        for place, request in enumerate(requests):
            ids = tuple(next(self.turns))
            yield [(place, [Completion(ids, (0.0,) * len(ids), (0.0,) * len(ids), "stop", request.seeds[0])])]


def runs(values, mask):
    """(whether it is masked in, its values) of every run of equal marks."""
    pairs = itertools.groupby(zip(values, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [(own, [value for value, _ in group]) for own, group in pairs]


@pytest.mark.parametrize("family", rooms.FAMILIES)
def test_what_a_demonstration_says_is_what_an_episode_plays(family):
    """The calls are read, the tool is asked and answers in the family's form, and the policy's turns alone are trained."""
    tools, asked = [get_json_schema(rooms.open_door)], [{"role": "user", "content": "K7: two doors on?"}]
    shown = [{"messages": [*asked, *rooms.demonstration("K7", random.Random(n))], "tools": tools} for n in range(9)]
    tokenizer, kwargs = rooms.tokenizer_of(family, shown), rooms.kwargs_of(family)
    set_render_settings(tokenizer, kwargs, date.today())
    right = validate({"messages": [*asked, *rooms.demonstration("K7", Careful())], "tools": tools}, "sft", "x")
    turns = [ids for text in examples(tokenizer, right) for own, ids in runs(text.ids, text.mask) if own]
    first, second = rooms.open_door("K7"), rooms.open_door(rooms.open_door("K7"))

    row = validate({"prompt": asked, "tools": tools}, "prompt-only", "x")
    (episode,) = play(
        Episodes(InProcess(ToolBoxes([rooms.open_door], call_form_of(tokenizer, **kwargs))), max_turns=4),
        Reciting(turns),
        [(0, tuple(prompt_ids(tokenizer, row)), row)],
        SamplingParams(max_tokens=32, stop_token_ids=stop_token_ids(tokenizer, row)),
        num_generations=1,
        seed_of=lambda i, k: 0,
        tokenizer=tokenizer,
        version=0,
        max_length=512,
    )
    assert episode.turns == len(turns) == 3 and episode.completion.finish_reason == "stop"
    assert episode.policy_turns[-1] == second and [m["content"] for m in episode.messages[1::2]] == [first, second]
    contexts = episode.contexts
    assert len(contexts) == (3 if family == "qwen3" else 1), "Qwen3 with thinking off reads another past before each turn"
    played = [run for c in contexts for run in runs(c.ids, episode.mask[c.start : c.start + len(c.ids)])]
    assert [ids for own, ids in played if own] == turns
    heard = [tokenizer.decode(ids) for own, ids in played if not own] or [tokenizer.decode(c.prompt_ids) for c in contexts[1:]]
    assert len(heard) == 2 and first in heard[0] and second in heard[1]
    assert 20 < len(episode.prompt_ids) + len(episode.completion.ids) < 120, "few tokens: it is trained on a CPU"


@pytest.mark.long
@pytest.mark.parametrize("family", rooms.FAMILIES)
def test_grpo_learns_to_use_the_tool_and_learns_nothing_from_one_of_another_house(family, tmp_path, capsys):
    rooms.main(tmp_path, family)
    means, asked = {}, {}
    for name in ("with_the_tool", "control"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        means[name] = [row["eval/exact/mean"] for row in rows if "eval/exact/mean" in row]
        rolled = [json.loads(line) for line in (tmp_path / name / "rollouts.jsonl").read_text().splitlines()]
        asked[name] = [row["turns"] for row in rolled if row["kind"] == "eval" and row["step"] == 80]
    assert means["with_the_tool"][0] < 0.6 and means["with_the_tool"][-1] >= 0.85
    assert max(means["control"]) < 0.1
    assert sum(turns == 3 for turns in asked["with_the_tool"]) > 0.85 * rooms.HELD_OUT
    assert "with the tool after" in capsys.readouterr().out
