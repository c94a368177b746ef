"""lm-eval on psigrad's models against lm-eval's own `hf` model on the same files."""

from __future__ import annotations

import json
import random
import shutil
from datetime import date
from pathlib import Path

import pytest
import yaml

from psigrad import cli
from psigrad.config import LmEvalConfig
from psigrad.language.models import tiny
from psigrad.records.checkpoint import MANIFEST
from psigrad_extras.connect import lm_eval as harness

# lm-eval reads ten thousand files to know that a name is none of its tasks
pytestmark = [pytest.mark.lm_eval, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request, tmp_path_factory) -> str:
    """A tiny model with random weights that are large enough for answers to differ."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny.tokenizer(["The capital of France is Paris. She has two cats. Water boils at 100 degrees."] * 3, 300)
    network = tiny.model(request.param, len(tokenizer), hidden=32, layers=2, heads=2, seed=3)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> str:
    """YAML files of a multiple choice, a written answer and a perplexity, on rows made here."""
    folder = tmp_path_factory.mktemp("tasks")
    words = ["cat", "dog", "Paris", "water", "two", "the", "boils", "she"]
    rng = random.Random(0)
    text = lambda n: " ".join(rng.choice(words) for _ in range(n))  # noqa: E731
    rows = [
        {"query": text(rng.randint(1, 9)), "choices": [text(rng.randint(1, 4)) for _ in range(3)], "gold": rng.randint(0, 2)}
        for _ in range(24)
    ]
    rows += [{"query": "", "choices": ["cat", "two dogs"], "gold": 0}, {"query": text(400), "choices": ["cat", "dog"], "gold": 1}]
    (folder / "rows.jsonl").write_text("".join(json.dumps({**row, "text": row["query"] or "cat"}) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{query}}",
    }
    acc = {"aggregation": "mean", "higher_is_better": True}
    made = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc", **acc}, {"metric": "acc_norm", **acc}],
        },
        "written": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["a", "ter b"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match", **acc}],
        },
        "filtered": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "exact_match", **acc}],
            "filter_list": [
                {"name": "whole", "filter": [{"function": "take_first"}]},
                {"name": "word", "filter": [{"function": "regex", "regex_pattern": "(\\w+)"}, {"function": "take_first"}]},
            ],
        },
        "perplexity": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    }
    for name, own in made.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **own}))
    return str(folder)


def evaluated(kind: str, model: str, tasks: str, names: list[str], **arguments: object):
    arguments = {"pretrained": model, "dtype": "float32", **arguments}
    if kind == "hf":
        arguments |= {"device": "cpu", "batch_size": 1}
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=tasks, include_defaults=False)
    return lm_eval.simple_evaluate(model=kind, model_args=arguments, tasks=names, task_manager=manager, bootstrap_iters=0)


@pytest.mark.parametrize("budget", [64, 4096])
def test_likelihoods_answers_and_metrics_are_those_of_hf(model, tasks, budget):
    names = ["choice", "written", "perplexity"]
    ours = evaluated("psigrad", model, tasks, names, micro_batch_tokens=budget)
    theirs = evaluated("hf", model, tasks, names)
    for name in names:
        assert len(ours["samples"][name]) == len(theirs["samples"][name]) == 26
        for mine, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            for (x,), (y,) in zip(mine["resps"], other["resps"], strict=True):
                if name == "written":
                    assert x == y
                elif name == "choice":
                    assert float(x[0]) == pytest.approx(float(y[0]), abs=2e-4) and bool(x[1]) == bool(y[1])
                else:
                    assert float(x) == pytest.approx(float(y), abs=2e-3)
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-5), metric
    answers = [sample["resps"][0][0] for sample in ours["samples"]["written"]]
    assert len(set(answers)) > 5 and not any("a" in text for text in answers)


def test_another_model_is_noticed(model, tasks, tmp_path):
    """Negative control of the agreement."""
    network = tiny.model("llama", 300, hidden=32, layers=2, heads=2, seed=4)
    network.save_pretrained(tmp_path)
    tiny.tokenizer(["The capital of France is Paris."], 300).save_pretrained(tmp_path)
    one, other = (evaluated("psigrad", path, tasks, ["choice"])["samples"]["choice"] for path in (model, str(tmp_path)))
    assert max(abs(float(a["resps"][0][0][0]) - float(b["resps"][0][0][0])) for a, b in zip(one, other, strict=True)) > 1


def test_the_command_compares_two_models_by_document(model, tasks, tmp_path, capsys):
    asked = ["lm-eval", "--model", model, "--baseline", model, "--tasks", "everyday", f"{tasks}/choice.yaml"]
    assert cli.main([*asked, "--limit", "9", "--output", str(tmp_path / "found.json")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "everyday" in printed and "choice" in printed and "0 [-0.4444, 0.4444]" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert {(m["task"], m["metric"], m["documents"]) for m in found["metrics"]} == {
        ("everyday", "acc", 9),
        ("choice", "acc", 9),
        ("choice", "acc_norm", 9),
    }
    assert all(m["difference"][0] == 0 and not m["difference"][1] >= 0 for m in found["metrics"]), "equal is not proven equal"


def test_each_filter_of_a_task_has_the_figure_that_lm_eval_gives_it(model, tasks):
    found = harness.run(LmEvalConfig(model=model, tasks=("filtered",), include_path=tasks))
    theirs = found.raw[model]["results"]["filtered"]
    assert {one.metric: (one.documents, one.model.mean) for one in found.metrics} == {
        name: (26, pytest.approx(theirs[name])) for name in ("exact_match,whole", "exact_match,word")
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "everyday"], "No model (--model) was given"),
        (["--model", "MODEL"], "No task (--tasks), such as everyday was given"),
        (["--model", "MODEL", "--tasks", "everyda"], "lm-eval has no task 'everyda'"),
        (["--model", "MODEL", "--tasks", "mine.yaml"], "There is no task file 'mine.yaml'"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_a_sentence(model, arguments, message, capsys):
    assert cli.main(["lm-eval", *(model if a == "MODEL" else a for a in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_sampled_answers_depend_on_the_seed_alone(model, tasks, tmp_path):
    path = tmp_path / "sampled.yaml"
    task = yaml.safe_load(Path(tasks, "written.yaml").read_text())
    task |= {"task": "sampled", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}}
    path.write_text(yaml.safe_dump(task))
    said = [
        [s["resps"][0][0] for s in evaluated("psigrad", model, tasks, [str(path)], seed=seed)["samples"]["sampled"]]
        for seed in (0, 0, 1)
    ]
    assert said[0] == said[1] != said[2]


def test_what_the_sampler_does_not_know_is_refused(model):
    found = harness.HarnessModel(model)
    with pytest.raises(harness.UserError, match="num_beams, which psigrad's sampler does not know"):
        found._params({"num_beams": 4, "max_gen_toks": 3})


DATED = (
    "{{ strftime_now('%Y-%m-%d') }}{% if loud %}!{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_conversation_is_rendered_as_in_the_run_that_made_the_model(model, tmp_path):
    """Under the arguments that are given, and on the run's day; what lm-eval begins for the model is gone on with."""
    folder = tmp_path / "run" / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(DATED)
    asked, begun = [{"role": "user", "content": "a"}], {"role": "assistant", "content": "The"}
    today = harness.HarnessModel(str(folder)).apply_chat_template(asked)
    assert today == f"{date.today()}<user>a<|endoftext|><assistant>"
    (tmp_path / "run" / "checkpoints" / "step-00000010").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000010" / MANIFEST).write_text('{"date": "1999-12-31"}')
    for kwargs in ('{"loud": true}', {"loud": True}):
        made = harness.HarnessModel(str(folder), chat_template_kwargs=kwargs)
        assert made.apply_chat_template(asked) == "1999-12-31!<user>a<|endoftext|><assistant>"
        assert made.apply_chat_template([*asked, begun], False) == "1999-12-31!<user>a<|endoftext|><assistant>The"
    with pytest.raises(harness.UserError, match="chat_template_kwargs has 'lout'"):
        harness.HarnessModel(str(folder), chat_template_kwargs='{"lout": true}')
