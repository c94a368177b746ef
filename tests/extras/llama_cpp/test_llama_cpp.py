"""A model that was exported to GGUF says the same in llama.cpp as in psigrad: 50 prompts, greedy.

`f32` asks for the same answers. With `q8_0` llama.cpp rounds activations to 8 bits too, which psigrad does not: it is asked that
log-probs differ by as much as such rounding makes them differ, and no more.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xllamacpp
from tiny_jobs import sft_config
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from psigrad import cli
from psigrad.config import Data
from psigrad.language.data.templates import CHATML
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.models import tiny
from psigrad.language.recipes import sft
from psigrad_extras import sums
from psigrad_extras.connect import exporting

pytestmark = [pytest.mark.llama_cpp, pytest.mark.timeout(3600)]
PROMPTS, TOKENS = 50, 16
PLACES = ("France", "Japan", "Italy", "Spain", "Egypt", "Peru", "Canada", "Kenya", "Norway", "Brazil", "India", "Chile", "Cuba")
PLACES += ("Greece", "Poland")
QUESTIONS = [f"What is {a} + {b}?" for a, b in zip(range(3, 38), range(41, 6, -1), strict=True)]
QUESTIONS += [f"What is the capital of {place}?" for place in PLACES]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def spelt(folder: Path) -> tuple[str, list[str]]:
    """A tiny model that has learnt to say three letters backward, more or less, and words to ask it."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=3)) for _ in range(200)]
    rows = [
        {"prompt": [{"role": "user", "content": word}], "completion": [{"role": "assistant", "content": word[::-1]}]}
        for word in words
    ]
    tokenizer = tiny.tokenizer(["system user assistant"], 270)
    tokenizer.chat_template = CHATML
    network = tiny.model("llama", len(tokenizer), hidden=64, layers=2, heads=4, max_length=256)
    for place in (network, tokenizer):
        place.save_pretrained(folder / "base")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = sft_config(folder, folder / "run", max_steps=300, save_steps=0)
    data = Data(dataset=str(folder / "train.jsonl"))
    evaluation = replace(made.evaluation, eval_prompts=0, metric="")
    sft.run(
        replace(
            made,
            data=data,
            optim=replace(made.optim, learning_rate=4e-3),
            evaluation=evaluation,
            batch_size=16,
            micro_batch_tokens=2048,
        )
    )
    return str(folder / "run"), ["".join(rng.choices("abcdefgh", k=3)) for _ in range(PROMPTS)]


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def model(request, tmp_path_factory) -> tuple[str, list[str]]:
    """(a run or a model, what it is asked)"""
    folder = tmp_path_factory.mktemp(request.param)
    return spelt(folder) if request.param == "tiny" else (str(sums.smollm2(folder)), QUESTIONS)


def served(file: Path) -> xllamacpp.Server:
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(file), 256, 1
    settings.cpuparams.n_threads, settings.warmup, settings.use_jinja = 1, False, True
    return xllamacpp.Server(settings)


GREEDY = {"temperature": 0, "repeat_penalty": 1.0, "cache_prompt": False}


def ours(model: str, asked: list[str], folder: Path) -> list[str]:
    """The answers of `psigrad sample --temperature 0`."""
    rows = "".join(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n" for text in asked)
    (folder / "asked.jsonl").write_text(rows)
    command = ["sample", "--model", model, "--dataset", str(folder / "asked.jsonl"), "--output", str(folder / "said.jsonl")]
    greedy = ["--temperature", "0", "--num-generations-eval", "1", "--max-completion-length", str(TOKENS), "--threads", "1"]
    assert cli.main([*command, *greedy]) == 0
    said = {}
    for line in (folder / "said.jsonl").read_text().splitlines():
        row = json.loads(line)
        said[row["prompt"][-1]["content"]] = row["completion"][0]["content"]
    return [said.get(text, "") for text in asked]


def test_f32_gives_the_same_answers(model, tmp_path):
    source, asked = model
    made = exporting.run(source, "gguf", str(tmp_path / "out"), "f32")
    server = served(made.path)
    theirs = []
    for text in asked:
        found = server.handle_chat_completions({**GREEDY, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS})
        theirs.append((found if isinstance(found, dict) else json.loads(found))["choices"][0]["message"]["content"])
    mine = ours(source, asked, tmp_path)
    same = sum(one == other for one, other in zip(mine, theirs, strict=True))
    print(f"f32: {same} of {len(asked)} answers are the same, {len(set(mine))} different ones")
    assert same == PROMPTS and len(set(mine)) > 5
    shifted = sum(one == other for one, other in zip(mine, [*theirs[1:], theirs[0]], strict=True))
    assert shifted < PROMPTS / 2, "negative control"


def round_inputs(module: nn.Linear, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """What llama.cpp multiplies by weights of 8 bits: blocks of 32 numbers as integers up to 127, and their scale in float16."""
    blocks = given[0].reshape(-1, 32)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (((blocks / scale).round() * scale.half().float()).reshape(given[0].shape),)


def test_q8_0_differs_by_what_rounded_activations_make_of_it(model, tmp_path):
    source, asked = model
    made = exporting.run(source, "gguf", str(tmp_path / "out"), "q8_0")
    assert 0 < made.error < 0.006
    server, folder = served(made.path), convert_to_folder(str(made.path))
    words, network = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    texts, chosen, theirs = [], [], []
    for text in asked:
        turn = [{"role": "user", "content": text}]
        ids = words.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        found = server.handle_completions({**GREEDY, "prompt": ids, "max_tokens": TOKENS, "logprobs": 1})
        (choice,) = (found if isinstance(found, dict) else json.loads(found))["choices"]
        said = choice["logprobs"]["content"]
        texts.append((len(ids), torch.tensor([ids + [token["id"] for token in said]])))
        chosen += [token["id"] for token in said]
        theirs += [token["logprob"] for token in said]

    @torch.no_grad()
    def read() -> torch.Tensor:
        return torch.cat([network(ids).logits[0, start - 1 : -1].log_softmax(-1) for start, ids in texts])

    whole = read()
    own = whole.gather(-1, torch.tensor(chosen)[:, None])[:, 0]

    def off(logp: torch.Tensor) -> float:
        return float((logp - own).square().mean().sqrt())

    def off_rounded() -> float:
        return off(read().gather(-1, torch.tensor(chosen)[:, None])[:, 0])

    hooks = [part.register_forward_pre_hook(round_inputs) for part in network.modules() if isinstance(part, nn.Linear)]
    usual = off_rounded()
    layer = [part for part in network.model.layers[len(network.model.layers) // 2].modules() if isinstance(part, nn.Linear)]
    for part in layer:
        part.weight.data *= 1.05
    wrong = off_rounded()
    for hook in hooks:
        hook.remove()
    found, same = off(torch.tensor(theirs)), int((whole.argmax(-1) == torch.tensor(chosen)).sum())
    print(
        f"q8_0, weights off by {made.error:.2g}: {same} of {len(chosen)} tokens are the likeliest. Log-probs are off by "
        f"{found:.3g} (root of the mean square), by rounding activations {usual:.3g}, with a layer 5 % too large {wrong:.3g}"
    )
    assert found < 1.25 * usual
    assert wrong > 1.25 * usual, "negative control"
