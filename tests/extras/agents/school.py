"""A small model that learns the programs' calls from a teacher, which plays each program once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import trl

import psigrad
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.rollout.types import Completion, Sampler
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Call, Recorder, Served
from psigrad_serve.serving import running

TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
TASK = {"owner": "Zora", "mark": "amber", "inside": "walrus"}
END = "<|im_end|>"
# smolagents writes the ids of calls into its text, and each session has others
PLAYS = 6


class Teacher(Sampler, Recorder):
    """Answers the first task, whatever program asks, and keeps what it was asked and what it said."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.asked, self.said = tokenizer, list[Call](), list[str]()

    def prepare(self, session_id: str, call: Call) -> Call:
        """See `Recorder`."""
        self.asked.append(call)
        return call

    def steps(self, requests, params, cache=None) -> Iterator[Any]:
        """See `Sampler`."""
        tools = {tool["function"]["name"] for tool in self.asked[-1].row.columns["tools"]}
        owner, mark, inside = TASK.values()
        calls = [("find_box", {"owner": owner}), ("open_box", {"mark": mark})]
        if "bash" in tools:
            lines = (f"cat {owner}", f"cat {mark}", f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {inside}")
            calls = [("bash", {"command": line}) for line in lines]
        if "final_answer" in tools:
            calls.append(("final_answer", {"answer": inside}))
        text = inside
        if (turn := len(self.said)) < len(calls):
            name, arguments = calls[turn]
            text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        self.said.append(text)
        ids = (*self.tokenizer(text)["input_ids"], self.tokenizer.convert_tokens_to_ids(END))
        zeros = (0.0,) * len(ids)
        yield [(i, [Completion(ids, zeros, zeros, "stop", seed) for seed in each.seeds]) for i, each in enumerate(requests)]


def played(program: Callable[..., float], model: LanguageModel, sampler: Sampler | None, recorder: Recorder) -> float:
    """Return the reward of the task, played against a server."""
    engine = SamplingEngine(model, sampler=sampler)
    try:
        with running(Served(engine, recorder=recorder)) as at:
            url = f"{at.url}/v1"
            os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": at.token}
            return program(TASK, url, at.token)
    finally:
        engine.close()


READ = ("role", "content", "tool_calls")


def lessons(teacher: Teacher) -> Iterator[dict[str, Any]]:
    """A session's conversation, or each of its answers alone where the program rewrites what was said."""
    for turn, (call, text) in enumerate(zip(teacher.asked, teacher.said, strict=True)):
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if text.startswith("<tool_call>"):
            function = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            answer |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
        prompt = [{name: message[name] for name in READ if name in message} for message in call.row.prompt]
        for made in (one for message in prompt for one in message.get("tool_calls", ())):
            made.pop("id", None)
        read = (*call.prompt_ids, *teacher.tokenizer(f"{text}{END}")["input_ids"])
        later = teacher.asked[turn + 1 :]
        if later and later[0].prompt_ids[: len(read)] == read:
            continue
        rewritten = any(message["role"] == "assistant" and not message.get("tool_calls") for message in prompt)
        row = {"prompt": prompt, "completion": [answer]} if rewritten or later else {"messages": [*prompt, answer]}
        yield {**row, "tools": call.row.columns["tools"]}


def school(folder: Path, steps: int) -> Path:
    """Return the folder of a model that `steps` steps of SFT taught all programs' calls."""
    blank = tiny.tokenizer(["box"], 300)
    blank.chat_template = TEMPLATE
    empty = prepare(tiny.model("qwen3", len(blank), hidden=16, layers=1, heads=2, max_length=32768), blank)
    lines = []
    for program in PLAYS * programs.PROGRAMS:
        teacher = Teacher(blank)
        assert played(program, empty, teacher, teacher) == 1.0, program.__name__
        lines += [line for lesson in lessons(teacher) if (line := json.dumps(lesson)) not in lines]
    (folder / "lessons.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = tiny.tokenizer(lines, 4000)
    tokenizer.chat_template = TEMPLATE
    tiny.model("qwen3", len(tokenizer), hidden=64, layers=2, heads=4, max_length=8192).save_pretrained(folder / "new")
    tokenizer.save_pretrained(folder / "new")
    quiet = {"eval_prompts": 0, "progress": False, "report": False, "output_dir": str(folder / "school")}
    psigrad.train(
        "sft", model=str(folder / "new"), dataset=str(folder / "lessons.jsonl"), max_steps=steps, batch_size=len(lines),
        learning_rate=1e-2, lr_scheduler_type="cosine", max_length=8192, **quiet,
    )  # fmt: skip
    return folder / "school" / "model"
