"""Runs every command that the pages show, in the order of the pages, in a folder of their own, and counts how they end.

python tools/page_commands.py                                          what each command needs; nothing is run
python tools/page_commands.py --run FOLDER --demo runs/demo [PAGE …]   runs those that this machine can run

What a page leaves to its reader (MODEL, prompts.jsonl, my_module.py) is there: the model and the data that `psigrad demo` left.
Runs are cut to a step or two: whether the figures of a page come out is not what is asked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = "psigrad|python3?|pip|make|docker|torchrun|vllm|curl|cmp|export|for|echo|mkdir"
# The first that a command has is why it is not run.
NEEDS = {
    r"pip install|uv add": "packages from an index",
    r"…|\.\.\.": "is a form to be filled in",
    r"^docker ": "Docker",
    r"python -m (verl|openrlhf)": "another library, whose command the page translates",
    r"vllm|--gpu h100": "vLLM",
    r"--device cuda|--tflops": "",  # a plan is computed anywhere
    r"--reward code": "" if shutil.which("bwrap") else "bubblewrap",
    r"--nnodes|--cluster|nproc-per-node=8|--processes 8": "several machines",
    r"^psigrad push|--push-to-hub": "an account at the hub",
    r"--server |--base-url|localhost|OPENAI_BASE_URL": "a server of others",
    r"gsm8k|ifeval|labels-monday|--to adapter": "data or a run of the reader's own",
    r"--tinker|minigrid|demo-real|smollm2\(|--revision COMMIT|lm-eval|examples/environments": "a model or library of the network",
    r"~/": "",
}
SERVES = r"psigrad (studio (?!--)|serve )"
"""What goes on until Ctrl-C, and says at which address."""
MODELS = r"\b(Qwen/Qwen3-0.6B|Qwen/Qwen3-8B|HuggingFaceTB/\S+|PATH_OR_HUB_NAME|MODEL|STUDENT|TEACHER)\b"
ONLINE = "--prompts-per-step 4 --num-generations 8 --num-minibatches 1 --max-completion-length 8"
TRAINS = "--max-steps 2 --eval-prompts 4 --threads 1"
# What cuts a run, by its command; those of methods otherwise.
CUTS = {
    "control": "--total-timesteps 2048 --eval-episodes 2",
    "sample": "--eval-prompts 100 --max-completion-length 12",
    "eval": "--eval-prompts 8 --max-completion-length 8",
    "compare": f"{TRAINS} --eval-steps 1 --prompts-per-step 4",
    "sweep": "--max-steps 2 --eval-prompts 4 --batch-size 4",
}
MY_MODULE = '''
def my_reward(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]

def right_answer(completions, answer, **columns):
    """Of episodes with tools: their last message."""
    return [float(episode[-1]["content"].strip() == right) for episode, right in zip(completions, answer)]

def score(completions, **columns):
    return [float(len(str(text)) % 3) for text in completions]

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b

class Guess:
    def reset(self, row):
        self.secret = row["secret"]

    def step(self, completion):
        right = completion.strip() == str(self.secret)
        return "try again", float(right), right
'''
TRL_SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from my_module import my_reward

trainer = GRPOTrainer(model="model", reward_funcs=my_reward, args=GRPOConfig(output_dir="out"), train_dataset="prompts.jsonl")
trainer.train()
"""
AGENT = """
def solve(row, client):
    answer = client.chat.completions.create(model="policy", messages=list(row["prompt"]))
    return float(len(answer.choices[0].message.content) > 2)
"""


@dataclass(frozen=True)
class Command:
    """A command of a page, as it stands there but for lines that go on."""

    page: str
    text: str

    @property
    def needs(self) -> str:
        """What this machine lacks for it; nothing where it can be run."""
        return next((why for pattern, why in NEEDS.items() if re.search(pattern, self.text)), "")


def commands(page: Path) -> Iterator[Command]:
    """Those in blocks that are in no language, or in the shell's; behind two spaces stands what a command does."""
    for language, body in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        lines = re.sub(r"\\\n\s*", "", textwrap.dedent(body)) if language in ("", "sh", "bash", "console") else ""
        lines = re.sub(r"; do (psigrad[^\n]*)\n\s*", r"; do \1 ", lines)
        for line in lines.splitlines():
            found = re.match(rf"(?:\$ )?((?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) .*|[A-Z]=\S+|\. \S+)", line)
            if found and not line.startswith("psigrad serve  http"):
                text = re.sub(r"\s+#.*", "", found[1])
                yield Command(str(page.relative_to(ROOT)), text.split("  ")[0] if "experiment" in text else text)


def pages() -> list[Path]:
    """All pages, in the order in which they are read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shortened(text: str) -> str:
    """The command on the demo's model, and at a size of seconds."""
    from psigrad.config.methods import list_declarations

    if text.startswith("for "):
        return text.replace("--eval-prompts 400", "--eval-prompts 8")
    text = text.replace("--trials 20", "--trials 2").replace("--seeds 0 1 2", "--seeds 0")
    text = text.replace("rooms.py", "rooms.py runs/rooms gemma4")  # one of the families of templates
    text = re.sub(r"--step \d+", "--step 2", re.sub(MODELS, "model", text))
    name = re.match(r"(?:[A-Z_]+=\S+ )?(?:torchrun \S+ -m )?psigrad (\S+)", text)
    if name is None or "--config" in text or re.search(SERVES, text):
        return text
    method = list_declarations().get(name[1])
    if method is not None and method.online and not re.search("--(reward|environment|agent|reference)", text):
        text += " --reward similarity"  # as the page of other libraries' commands says
    of_method = "" if method is None else f"{TRAINS} {ONLINE}" if method.online else f"{TRAINS} --batch-size 4"
    return f"{text} {CUTS.get(name[1], of_method)}"


def write_files(page: Path, folder: Path) -> None:
    """The Python files that a page has its reader write: a block behind their name. `my_module.py` has those of all pages."""
    for name, source in re.findall(r"`(\w+\.py)`[^`]*\n```python\n(.*?)```", page.read_text(), re.DOTALL):
        if name != "my_module.py":
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_text(source)


def make_model(place: Path, demo: Path) -> None:
    """A model as pages mean it, trained on conversations and with room for tools: the demo's, some steps of SFT further."""
    from psigrad.language.data.templates import CHATML

    begun = shutil.copytree(demo / "sft" / "model", place / "begun")
    (begun / "chat_template.jinja").write_text(CHATML)
    config = json.loads((begun / "config.json").read_text())
    (begun / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    text = "psigrad sft --model begun --dataset runs/demo/data/demonstrations.jsonl --output-dir trained"
    start(f"{text} --max-steps 30 --learning-rate 1e-3 --eval-prompts 0 --threads 1", place, {}, place / "begun.log").join()
    (place / "trained" / "model").rename(place / "model")
    for done in (begun, place / "trained"):
        shutil.rmtree(done)


def prepare(folder: Path, demo: Path) -> None:
    """The files that pages speak of, beside those that they show."""
    from datasets import Dataset

    folder.mkdir(parents=True)
    shutil.copytree(demo, folder / "runs" / "demo")
    make_model(folder, demo)
    for name in ("mine", "sums"):
        (folder / "runs" / name).symlink_to("demo/grpo")
    rows = [json.loads(line) for line in (demo / "data" / "demonstrations.jsonl").read_text().splitlines()[:400]]
    rows = [
        {**row, "secret": 3, "start": "1", "tests": [f"assert spell('{row['answer']}') == {row['answer']!r}"]} for row in rows
    ]
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": " x"} for r in rows]
    plain = [{key: value for key, value in row.items() if key != "completion"} for row in rows]
    for name, lines in {
        "prompts problems instructions": plain,
        "tasks": [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in plain],
        "demonstrations rows held_out completions texts": rows,
        "comparisons pairs Which-is-nearer-preference": pairs,
    }.items():
        for file in name.split():
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Dataset.from_list(plain).to_parquet(folder / "prompts.parquet")
    for name, source in {
        "my_module.py": MY_MODULE,
        "reward.py": MY_MODULE,
        "my_agent.py": AGENT,
        "train_grpo.py": TRL_SCRIPT,
    }.items():
        (folder / name).write_text(source)
    settings = {"model": "model", "dataset": "prompts.jsonl", "reward": "similarity", "output_dir": "runs/scale"}
    small = {"max_steps": 2, "eval_prompts": 4, "prompts_per_step": 4, "num_generations": 2, "max_completion_length": 8}
    of_trl = {"model_name_or_path": "model", "dataset_name": "demonstrations.jsonl", "per_device_train_batch_size": 4}
    for name, lines in {"run.yaml": {**settings, **small}, "sft.yaml": of_trl}.items():
        (folder / name).write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    (folder / "examples").symlink_to(ROOT / "examples")


def place_of(page: Path, first: Path) -> Path:
    """The folder of a page's commands: copies of the first page's files, and its runs but for those that the page writes."""
    place, text = first / page.relative_to(ROOT).with_suffix(""), page.read_text()
    if page.name != "README.md" and not place.exists():
        (place / "runs").mkdir(parents=True)
        for there in [*first.glob("README/*"), *first.glob("README/runs/*")]:
            here = place / there.relative_to(first / "README")
            if there.is_file():
                shutil.copy(there, here)
            elif there.name != "runs" and f"--output-dir runs/{there.name}" not in text:
                here.symlink_to(there)
    return place


def start(text: str, folder: Path, variables: dict[str, str], log: Path) -> multiprocessing.Process:
    """In a fork: starting Python and loading torch takes longer than most commands do. Other programs by a shell."""

    def work() -> None:
        os.setsid()
        os.chdir(folder)
        os.environ.update(variables, COLUMNS="120")
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (said, 1), (said, 2)):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
        words = shlex.split(os.path.expandvars(text))
        sys.argv = words
        status = os.system(text) >> 8 if words[0] != "psigrad" or re.search("[<>;|&]", text) else cli.main(words[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    from psigrad import cli
    from psigrad.language.recipes import evaluate, online, preference, reward, sft  # noqa: F401

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def run(command: Command, folder: Path, variables: dict[str, str], log: Path, limit: float) -> tuple[str, str]:
    """How it ended (`passed`, or the status), and what it said last."""
    text = shortened(command.text)
    if found := re.match(r"([A-Z]+)=(\S+)$|export (\w+)=(\S+)", text):
        variables[found[1] or found[3]] = found[2] or found[4]
        return "passed", ""
    print(f"$ {text}", flush=True)
    log.write_text("")
    process, until = start(text, folder, variables, log), time.monotonic() + limit
    serves = bool(re.search(SERVES, text))
    while process.is_alive() and time.monotonic() < until and not (serves and "http://" in log.read_text(errors="replace")):
        process.join(0.3)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGINT if serves else signal.SIGKILL)
        process.join(60)
    late = time.monotonic() > until
    lines = log.read_text(errors="replace").strip().splitlines()
    status = f"over {limit:.0f} s" if late else str(process.exitcode)
    return "passed" if status == "0" or (serves and status in ("130", "-2")) else status, " | ".join(lines[-3:])


def main() -> int:
    """Status 1 where a command failed that this machine can run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="of these pages alone")
    parser.add_argument("--run", type=Path, help="a folder that is not there yet, or of this tool's earlier call")
    parser.add_argument("--demo", type=Path, default=ROOT / "runs" / "demo", help="what `psigrad demo` left")
    parser.add_argument("--numbers", nargs="*", type=int, help="those of the commands to run; all without it")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that a command may take")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    asked.run = asked.run and asked.run.resolve()  # links lead into it
    asked.pages = [page.resolve() for page in asked.pages] or pages()
    found = [command for page in asked.pages for command in commands(page)]
    if asked.run and not (asked.run / "README").exists():
        prepare(asked.run / "README", asked.demo)
    ended, variables = Counter[str](), {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for number, command in enumerate(found):
        if asked.numbers and number not in asked.numbers:
            continue
        how, said = (f"needs {command.needs}", "") if command.needs else ("can be run", "")
        if asked.run and not command.needs:
            place = place_of(ROOT / command.page, asked.run)
            write_files(ROOT / command.page, place)
            of_checkout = re.match(r"make |\. ", command.text)
            how, said = run(command, ROOT if of_checkout else place, variables, asked.run / "log", asked.limit)
        ended[how] += 1
        print(f"{number:3} {how:12} {command.page}: {shlex.quote(command.text)[:150]} {said}", flush=True)
    for how, count in ended.most_common():
        print(f"{count:4} {how}")
    return int(any(how != "passed" and how != "can be run" and not how.startswith("needs") for how in ended))


if __name__ == "__main__":
    sys.exit(main())
