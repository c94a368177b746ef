"""`psigrad check`: sound models pass, and every check notices the fault that it is for."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trl
from cases import slow
from transformers import AutoTokenizer

from psigrad import cli
from psigrad.config import Data, Model, OnlineConfig, Run, Sampling
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import CHATML
from psigrad.language.models import language_model, tiny
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.objective import PolicyGradient
from psigrad_extras.preflight import check, first_rows

NAMES = [
    *("data", "end of text", "packing", "shared prompts", "sampling", "micro-batches", "processes", "reference", "saving"),
    "adapter",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Small models of several kinds, with weights large enough that what a text says matters."""
    root, found = tmp_path_factory.mktemp("models"), {}
    tokenizer = tiny.tokenizer(["say a: b", "what is 2 + 2?"], 270)
    tokenizer.chat_template = CHATML
    for kind in ("qwen3", "llama", "gpt2", "gpt_neox"):
        model = tiny.model(kind, len(tokenizer), hidden=32, layers=2, heads=2, max_length=96)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 2:
                    p.mul_(4.0)
        model.save_pretrained(root / kind)
        tokenizer.save_pretrained(root / kind)
        found[kind] = root / kind
    return found


def config(path: Path, **changes) -> OnlineConfig:
    model = {key: changes.pop(key) for key in ("dtype", "lora_rank") if key in changes}
    sampling = {key: changes.pop(key) for key in ("temperature", "top_k", "top_p", "sampler") if key in changes}
    return OnlineConfig(
        model=Model(path=str(path), **model),
        sampling=Sampling(max_completion_length=12, **sampling),
        run=Run(threads=1, progress=False),
        **changes,
    )


def verdicts(asked: OnlineConfig) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in check.run(asked)}


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", *slow("llama", "gpt_neox")])
def test_a_sound_model_passes(kind, models):
    found = check.run(config(models[kind]))
    assert [f.name for f in found] == NAMES
    assert check.all_pass(found), check.report(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rank": 4},
        {"sampler": "transformers"},
        {"algorithm": "ppo"},
        *slow({"dtype": "bfloat16"}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}),
        *slow({"algorithm": {"preset": "gspo", "entropy": {"coefficient": 0.1}}}),
    ],
    ids=str,
)
def test_so_it_does_with_other_settings(changes, models):
    found = check.run(config(models["qwen3"], **changes))
    assert check.all_pass(found), check.report(found)


def leaking(monkeypatch):
    """Packed sequences see one another: each text is computed behind those before it."""
    original = LanguageModel.evaluate

    def evaluate(self, inputs, **how):
        if how.get("packed") is None and len(inputs.prompts) > 1:
            ahead = list(inputs.prompts[0])
            prompts = [inputs.prompts[0], *([*ahead, *prompt] for prompt in inputs.prompts[1:])]
            inputs = replace(inputs, prompts=prompts)
        return original(self, inputs, **how)

    monkeypatch.setattr(LanguageModel, "evaluate", evaluate)


def other_log_probs(monkeypatch):
    """The sampler reports log-probs that are not the policy's."""
    original = EmbeddedSampler.sample

    def sample(self, requests, params):
        groups = original(self, requests, params)
        return [[replace(c, logprobs=tuple(x - 0.01 for x in c.logprobs)) for c in group] for group in groups]

    monkeypatch.setattr(EmbeddedSampler, "sample", sample)


def deaf_to_stops(monkeypatch):
    """The sampler ends at EOS alone."""
    own = EmbeddedSampler.sample
    monkeypatch.setattr(EmbeddedSampler, "sample", lambda self, asked, how: own(self, asked, replace(how, stop_token_ids=())))


def own_totals(monkeypatch):
    """Each micro-batch is normalised by its own counts."""
    own = PolicyGradient.loss
    monkeypatch.setattr(PolicyGradient, "loss", lambda self, x, now, totals, state: own(self, x, now, self.totals(x), state))


def lost_rank(monkeypatch):
    """What one of several processes found is left out of the sum."""
    original = check._sum
    monkeypatch.setattr(check, "_sum", lambda parts: original(parts[1:]))


def lossy_save(monkeypatch):
    """A matrix is left out of what is written."""
    original = LanguageModel.save_merged

    def save(self, folder):
        p = next(p for p in self.trainable().values() if p.dim() == 2)
        before = p.detach().clone()
        with torch.no_grad():
            p.mul_(1.01)
        original(self, folder)
        with torch.no_grad():
            p.copy_(before)

    monkeypatch.setattr(LanguageModel, "save_merged", save)


def sticky_adapter(monkeypatch):
    """Switching the adapter off does nothing."""
    monkeypatch.setattr(LanguageModel, "without_adapter", lambda self: nullcontext())


def drifting_reference(monkeypatch):
    """The reference is not the model that training starts from."""
    original = LanguageModel.frozen_copy

    def copy(self):
        made = original(self)
        with torch.no_grad():
            next(p for p in made.network.parameters() if p.dim() == 2).mul_(1.05)
        return made

    monkeypatch.setattr(LanguageModel, "frozen_copy", copy)


def endless(monkeypatch):
    """The EOS id is of another vocabulary."""
    monkeypatch.setattr(LanguageModel, "eos_token_ids", property(lambda self: (self.vocabulary + 5,)))


FAULTS = {
    leaking: {"packing"},
    other_log_probs: {"sampling"},
    deaf_to_stops: {"end of text"},
    own_totals: {"micro-batches", "processes"},
    lost_rank: {"processes"},
    lossy_save: {"saving"},
    sticky_adapter: {"adapter"},
    drifting_reference: {"reference"},
    endless: {"end of text"},
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, id=f.__name__, marks=pytest.mark.slow if f in (deaf_to_stops, sticky_adapter, endless) else ())
        for f in FAULTS
    ],
)
def test_a_planted_fault_fails_its_check(fault, models, monkeypatch):
    fault(monkeypatch)
    found = verdicts(config(models["qwen3"]))
    assert {name for name, verdict in found.items() if verdict == "failed"} >= FAULTS[fault]
    sound = {"data", "end of text", "saving"} - FAULTS[fault]
    assert all(found[name] == "ok" for name in sound)


def test_a_shared_prompt_that_is_another_for_the_second_completion_fails(models, monkeypatch):
    original = LanguageModel.evaluate

    def evaluate(self, inputs, **how):
        if any(len(group) > 1 for group in inputs.completions):
            inputs = replace(inputs, prompts=[[*prompt[:-1], 7] for prompt in inputs.prompts])
        return original(self, inputs, **how)

    monkeypatch.setattr(LanguageModel, "evaluate", evaluate)
    assert verdicts(config(models["qwen3"]))["shared prompts"] == "failed"


@pytest.mark.parametrize("held", [check.check_micro_batches, check.check_processes])
def test_completions_that_are_all_alike_have_a_gradient_to_compare(held, models):
    """As of a model that ends each answer at once: around their mean, their terms cancel to rounding."""
    subject = check.load_subject(config(models["qwen3"]))
    alike = replace(subject, trajectories=[[group[0]] * len(group) for group in subject.trajectories])
    finding = held(alike)
    assert finding.verdict == "ok" and finding.control < 100


def test_a_control_that_shows_nothing_leaves_a_check_unproven(models, tmp_path):
    """A model that says the same whatever it reads."""
    model = language_model.load(str(models["gpt2"])).network
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "c_proj.weight" in name or "wte" in name or "wpe" in name:
                p.zero_()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(models["gpt2"]).save_pretrained(tmp_path)
    found = check.run(config(tmp_path))
    assert {f.name: f.verdict for f in found}["packing"] == "unproven"
    assert not check.all_pass(found)
    assert "Unproven: packing" in (said := check.report(found)) and "the prompts or the answers are alike" in said
    rounded = check.Finding("packing", "", value=1e-2, bound=5e-2, control=4e-2)  # in bfloat16
    assert check.report([rounded]).endswith("check once with --dtype float32.")
    counted = check.Finding("data", "", value=0, bound=0.0, control=120)
    assert check.report([counted]).splitlines()[1].split() == ["ok", "data", "0", "0", "120"]
    proven = [f for f in found if f.verdict == "ok"]
    assert "Unproven" not in check.report(proven)


def rows(path: Path, prompts: list) -> Data:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return Data(dataset=str(path))


def test_the_dataset_is_looked_at(models, tmp_path):
    data = rows(tmp_path / "long.jsonl", ["say a:", "say b:", "x" * 90])
    (found, *_) = check.run(config(models["qwen3"], data=replace(data, plain_prompts=True)))
    assert (found.verdict, found.value) == ("failed", 1)
    assert "long.jsonl:3 has 90 tokens; at most 84 tokens fit (the model's" in found.note
    with pytest.raises(UserError, match="needs two prompts that fit into the model"):
        check.run(config(models["qwen3"], data=rows(tmp_path / "one.jsonl", ["x"])))


@pytest.mark.parametrize(
    ("asked", "status"), [(["sft"], 0), (["dpo"], 0), (["sft", "--reward", "exact"], 1), (["grpo", "--reward", "exact"], 1)]
)
def test_only_a_run_that_samples_keeps_positions_for_a_completion(asked, status, models, tmp_path, monkeypatch, capsys):
    """The model has 96 positions, max_completion_length is 256, and the prompts have 6 tokens."""

    def passing(subject):
        """Return the check "text" of a sound model."""
        return check.Finding("text", "", 0, 0.0, 1)

    others = ["text", "packing", "sharing", "sampling_logps", "micro_batches", "processes", "reference", "saving", "adapter"]
    for name in others:
        monkeypatch.setattr(check, f"check_{name}", passing)
    row = {"answer": "a", "completion": "a"} if "dpo" not in asked else {"chosen": "a", "rejected": "b"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"say {c}:", **row}) + "\n" for c in "abcd"))
    flags = ["--model", str(models["qwen3"]), "--dataset", str(tmp_path / "a.jsonl"), "--device", "cpu", "--threads", "1"]
    assert cli.main(["check", *asked, *flags]) == status
    assert (
        "at most 0 tokens fit (the model's 96 positions minus max_completion_length 256)" in capsys.readouterr().out
    ) == status


def test_rows_that_the_template_cannot_say_are_named_as_in_the_file_or_left_out_when_asked(tmp_path, capsys):
    """The middle row's name is in no rendering: one of three, and the prompts of the others stay, with their places."""
    tokenizer = tiny.tokenizer(["say a: b", "what is 2 + 2?"], 270)
    tokenizer.chat_template = CHATML
    tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, max_length=1024).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    talks = [[{"role": "user", "content": text}] for text in ("say a", "say b", "what is 2 + 2?")]
    talks[1][0]["name"] = "Al"
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    data = Data(dataset=str(tmp_path / "talks.jsonl"))
    with pytest.raises(UserError, match=r"talks\.jsonl:2: column 'messages\[0\]\.name' is dropped.*--bad-rows skip"):
        check.load_subject(config(tmp_path, data=data))
    subject = check.load_subject(config(tmp_path, data=replace(data, bad_rows="skip")))
    assert [prompt.row.source[-1] for prompt in subject.dataset] == ["1", "3"] and check.check_data(subject).verdict == "ok"
    assert (
        "1 of 3 rows were rejected and skipped. The first one is talks.jsonl:2: column 'messages[0].name'"
        in capsys.readouterr().err
    )


def test_a_chat_template_that_does_not_open_the_turn_is_found(models, tmp_path):
    data = rows(tmp_path / "chat.jsonl", [[{"role": "user", "content": text}] for text in ("say a", "what is 2 + 2?")])
    assert verdicts(config(models["qwen3"], data=data))["end of text"] == "ok"
    model = language_model.load(str(models["qwen3"]))
    model.tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    model.save_merged(tmp_path / "closed")
    with pytest.raises(UserError, match=r"does not open the assistant's turn: .*<\|im_start\|>assistant"):
        check.load_subject(config(tmp_path / "closed", data=data))


def test_a_chat_template_without_words_for_tools_is_told(tmp_path):
    def price(item: str) -> int:
        """The price of an item.

        Args:
            item: its name
        """
        return len(item)

    tokenizer = tiny.tokenizer(["say a: b", "what is 2 + 2?"], 270)
    data = rows(tmp_path / "chat.jsonl", [[{"role": "user", "content": text}] for text in ("say a", "what is 2 + 2?")])
    notes = []
    for template in (CHATML, "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}" + CHATML):
        tokenizer.chat_template = template
        tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, max_length=1024).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        found = check.check_text(check.load_subject(config(tmp_path, data=data, tools=(price,))))
        assert found.verdict == "ok", found
        notes.append(found.note)
    assert notes[0].startswith("tools are listed in the system prompt") and "tools are listed" not in notes[1]


@pytest.mark.parametrize("fault", ["tokens", "pad", "acts"])
def test_tokens_without_embedding_and_a_generation_config_that_acts_are_found(fault, models, tmp_path):
    model = language_model.load(str(models["qwen3"]))
    if fault == "tokens":
        model.tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>", "<|newer|>"]})
    elif fault == "pad":
        model.tokenizer.pad_token = None
    else:
        model.network.generation_config.repetition_penalty = 1.05
    model.save_merged(tmp_path)
    found = check.check_text(check.load_subject(config(tmp_path)))
    assert (found.verdict, found.note) == {
        "tokens": ("failed", "2 tokens of the tokenizer have no row in the embedding ('<|new|>', '<|newer|>')"),
        "pad": ("ok", ""),
        "acts": ("ok", "generation_config has repetition_penalty=1.05, which is not used"),
    }[fault]


def test_one_call_is_played_through_the_chat_template(models, tmp_path):

    model = language_model.load(str(models["qwen3"]))
    model.tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    model.save_merged(tmp_path / "calls")
    subject = check.load_subject(config(tmp_path / "calls", tools=()))
    subject.prompts[0] = replace(subject.prompts[0], row=Row("chat", prompt=[{"role": "user", "content": "say a"}]))
    found = check.check_tools(subject)
    assert (found.verdict, found.value, found.control) == ("ok", 0, 1)
    assert found.note.startswith("Hermes: ") and '<tool_call> {"name": "find_price", "arguments": {"item":' in found.note
    # templates that write what nobody reads, and what is no JSON
    template = subject.model.tokenizer.chat_template
    for fault in (
        template.replace("<tool_call>", "<call>"),
        template.replace("tool_call.arguments | tojson", "tool_call.arguments"),
    ):
        assert fault != template
        subject.model.tokenizer.chat_template = fault
        assert check.check_tools(subject).verdict == "failed"


def test_the_rows_that_are_shown_offer_the_tools(models, tmp_path):
    model = language_model.load(str(models["qwen3"]))
    model.tokenizer.chat_template = CHATML
    model.tokenizer.save_pretrained(tmp_path / "chat")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "say a"}]}))
    shown = [
        "".join(piece.text for piece in first_rows.read_first_rows(made)[0].pieces)
        for made in (
            replace(config(tmp_path / "chat", tools=tools), data=Data(dataset=str(tmp_path / "rows.jsonl")))
            for tools in ((), (price_of_an_item,))
        )
    ]
    assert ["price_of_an_item" in text for text in shown] == [False, True]


def price_of_an_item(item: str) -> int:
    """What it costs.

    Args:
        item: what is bought
    """
    return len(item)


def test_the_command_prints_a_table_or_json_and_its_status_tells(models, tmp_path, capsys, monkeypatch):
    arguments = ["check", "--model", str(models["qwen3"]), "--max-completion-length", "8"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + len(NAMES) and all(line.startswith("ok") for line in shown[1:])
    other_log_probs(monkeypatch)
    assert cli.main([*arguments, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is False and [c["name"] for c in told["checks"]] == NAMES
    assert [c["verdict"] for c in told["checks"] if c["name"] == "sampling"] == ["failed"]
    assert cli.main(["check", "--model", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_a_check_that_breaks_is_a_failed_one(models, monkeypatch):
    def broken(self, folder):
        raise RuntimeError("no room on the device")

    monkeypatch.setattr(LanguageModel, "save_merged", broken)
    found = {f.name: f for f in check.run(config(models["qwen3"]))}["saving"]
    assert (found.verdict, found.what, found.note) == ("failed", "could not be checked", "no room on the device")
