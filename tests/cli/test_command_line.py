"""What a user types: quick help, one-sentence errors, settings from everywhere."""

from __future__ import annotations

import contextlib
import errno
import importlib
import operator
import re
import resource
import runpy
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

import psigrad
from psigrad import cli, extras
from psigrad.cli import flags
from psigrad.cli import language_models as language
from psigrad.compat.foreign_names import load, resolve_names
from psigrad.config import EvalConfig, OnlineConfig, PreferenceConfig, RewardConfig, SampleConfig, SFTConfig
from psigrad.config.fields import flag_of, help_of, settings_of
from psigrad.errors import UserError
from psigrad.runs.result import Result

ROOT = Path(__file__).parents[2]
CONFIGS = [SFTConfig, OnlineConfig, EvalConfig, PreferenceConfig, RewardConfig, SampleConfig]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_help_answers_within_half_a_second():
    def used():  # of a processor: what else the machine does is not counted
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    seconds = []
    for _ in range(5):
        start = used()
        done = subprocess.run([sys.executable, "-m", "psigrad", "--all"], capture_output=True, text=True, check=True, cwd=ROOT)
        seconds.append(used() - start)
    assert min(seconds) <= 0.5
    assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize(
    "code", ["import psigrad", "from psigrad.cli import main; main(['--help'])", "import psigrad.language.rewards"]
)
def test_nothing_heavy_is_imported_before_it_is_needed(code):
    heavy = python(
        f"import sys\n{code}\nprint([m for m in ('torch', 'transformers', 'datasets', 'matplotlib') if m in sys.modules])"
    )
    assert heavy.splitlines()[-1] == "[]"


def test_help_of_a_command_needs_no_torch_and_shows_every_setting():
    command = "from psigrad.cli import main\ntry: main(['grpo', '--help-all'])\nexcept SystemExit: pass"
    out = python(
        f"import sys\n{command}\nprint([m for m in ('torch', 'transformers', 'datasets', 'matplotlib') if m in sys.modules])"
    )
    assert out.splitlines()[-1] == "[]"
    for name in settings_of(OnlineConfig):
        assert flag_of(name) in out


def test_what_a_setting_means_is_read_out_of_the_source_for_help_alone(monkeypatch, capsys):
    read = []
    monkeypatch.setattr(flags, "help_of", lambda cls, name: read.append(name) or "What it is.")
    assert flags.parse(OnlineConfig, "grpo", ["--max-steps", "3"]).run.max_steps == 3 and not read
    for asked in (["--help"], ["--max-steps", "3", "-h"], ["--help-all"]):
        read.clear()
        with pytest.raises(SystemExit):
            flags.parse(OnlineConfig, "grpo", asked)
        assert "run.max_steps" in read and "What it is." in capsys.readouterr().out


@pytest.mark.parametrize("command", [["grpo"], ["sft"], ["dpo"], ["reward"], ["plan", "grpo"], ["control"], ["eval"]])
def test_short_help_shows_what_matters_and_its_last_line_says_how_to_see_all(command, capsys):
    text = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main([*command, flag])
        text[flag] = capsys.readouterr().out
    flags_of = {flag: set(re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE)) for flag, shown in text.items()}
    assert 12 <= len(flags_of["--help"]) <= 36 and flags_of["--help"] < flags_of["--help-all"]
    last = text["--help"].splitlines()[-1]
    assert f"`psigrad {' '.join(command)} --help-all` shows all" in last and last not in text["--help-all"]


def test_help_of_every_command_says_what_it_does(capsys):
    silent = []
    for name in cli.COMMANDS:
        with contextlib.suppress(SystemExit):
            cli.main([name, "--help"])
        paragraphs = capsys.readouterr().out.split("\n\n")
        if len(paragraphs) < 2 or paragraphs[1].startswith(("options:", "parts of")):
            silent.append(name)
    assert not silent


@pytest.mark.parametrize("name", ["check", "compare"])
def test_help_of_a_command_with_the_flags_of_a_run_says_what_the_command_does(name, capsys):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert OnlineConfig.__doc__.split(":")[0] not in shown and f"`psigrad {name} --help-all` shows all" in shown


def test_help_shows_the_defaults_of_the_method(capsys):
    for method, passes in (("ppo", 4), ("grpo", 1)):
        with pytest.raises(SystemExit):
            cli.main([method, "--help-all"])
        assert f"Passes over each collected batch. (default {passes})" in capsys.readouterr().out


def test_negative_control_something_heavy_is_noticed():
    assert python("import sys\nimport psigrad.objective.slopes\nprint('torch' in sys.modules)") == "True\n"


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_setting_has_a_help_text(cls):
    for name in settings_of(cls):
        assert help_of(cls, name), name


def test_help_lists_the_words_that_a_setting_may_be(capsys):
    with pytest.raises(SystemExit):
        cli.main(["grpo", "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    usual = "(float32, bfloat16; default float32; on a GPU: bfloat16)"
    for text in (usual, "Completions per prompt (the group size G). (default 8)"):
        assert text in shown


def test_the_leaf_names_of_settings_are_unique():
    for cls in CONFIGS:
        leaves = [name.rpartition(".")[2] for name in settings_of(cls)]
        assert len(leaves) == len(set(leaves))


GRPO = [
    "grpo",
    "--model",
    "{model}",
    "--dataset",
    "{data}",
    "--reward",
    "exact",
    "--max-completion-length",
    "4",
    "--output-dir",
    "{tmp}/r",
]
MISTAKES = {
    "TRL's command": (["env"], "There is no command 'env': use `psigrad doctor`"),
    "unknown command": (["grpoo"], "There is no command 'grpoo'.*did you mean 'grpo'"),
    "unknown flag": (["grpo", "--learning-rat", "1"], "There is no flag --learning-rat.*did you mean '--learning-rate'"),
    "unknown override": (
        ["grpo", "optim.learningrate=1"],
        "there is no setting 'learningrate' in optim; did you mean 'learning_rate'",
    ),
    "another's name in a section": (["grpo", "optim.lr=3"], "there is no setting 'lr' in optim; did you mean 'learning_rate'"),
    "nothing scored": (
        ["score", "--dataset", "{tmp}/unanswered.jsonl", "--reward", "exact", "--output", "{tmp}/scores.jsonl"],
        "2 of 2 completions stayed unscored.*Fix the reward function or the dataset",
    ),
    "bad value": (["grpo", "--max-steps", "ten"], "run.max_steps is 'ten'; expected a whole number"),
    "bad choice": (["sft", "--dtype", "float16"], "model.dtype is 'float16'"),
    "stray word": (["sft", "hello"], "'hello' is neither a flag nor an override"),
    "no value": (["sft", "--dataset"], "expected at least one argument"),
    "missing file": (["sft", "--config", "nowhere.yaml"], "'nowhere.yaml' cannot be read"),
    "no model": (["sft", "--dataset", "x.jsonl", "--output-dir", "{tmp}/run"], "No model was given"),
    "no reward": (["grpo", "--model", "x", "--dataset", "x.jsonl"], "No reward was given"),
    "unknown reward": (
        ["grpo", "--model", "{model}", "--dataset", "{data}", "--reward", "exat", "--output-dir", "{tmp}/run"],
        "'exat'",
    ),
    "no dataset": (["grpo", "--model", "{model}", "--reward", "exact", "--output-dir", "{tmp}/run"], "No dataset was given"),
    "bad model": (["sft", "--model", "{tmp}", "--dataset", "{data}", "--output-dir", "{tmp}/run"], "No causal language model"),
    "bad algorithm": (["grpo", "--reward", "exact", "algorithm.surrogate=clipp"], "surrogate.*'clipp'.*did you mean 'clip'"),
    "parts that do not fit": (["grpo", "--reward", "exact", "algorithm.psi=gae"], "critic is None"),
    "group of one": (["grpo", "--reward", "exact", "--num-generations", "1"], "give at least 2"),
    "greedy": (["grpo", "--reward", "exact", "--temperature", "0"], "temperature is 0"),
    "bad top_p": ([*GRPO, "--top-p", "0"], "top_p is 0.*expected above"),
    "no rows": ([*GRPO, "--dataset", "{tmp}/empty.jsonl"], "has no rows; at least one"),
    "no such function": ([*GRPO, "--reward", "mine.py:nothing"], "mine.py has no 'nothing'"),
    "a tool without a docstring": ([*GRPO, "--tools", "mine.py:add"], "The tool '.*add' cannot be offered"),
    "minibatches without a group": (
        [*GRPO, "--prompts-per-step", "3", "--num-minibatches", "7"],
        "a minibatch takes all completions of a prompt",
    ),
    "actions that do not fit": (["control", "dqn", "--env", "Pendulum-v1"], "needs discrete actions, one at a time"),
    "no run": (["report", "{tmp}"], "is not a run folder"),
    "empty explain": (["explain"], "explain got 0 names but takes one or two"),
    "three names": (["explain", "grpo", "dapo", "rloo"], "explain got 3 names"),
    "no run folder": (["report"], "report got nothing; the usage is psigrad report RUN"),
    "unknown flag of compare": (
        ["compare", "grpo", "--sead", "1"],
        "; `psigrad compare --help-all` lists all flags; did you mean '--seed'",
    ),
    "unknown flag of report": (["report", "--outptu", "x"], "no flag --outptu.*did you mean '--output'"),
    "unknown flag of demo": (["demo", "--sed", "1"], "no flag --sed.*did you mean '--seed'"),
    "bad value of demo": (["demo", "--seed", "x"], "'x'; expected a whole number"),
    "no step of demo": (["demo", "--sft-steps", "0"], "sft_steps is 0; expected at least 1"),
    "argument of tasks": (["tasks", "chain_sum"], "The argument 'chain_sum' is neither a flag"),
    "a tab in YAML": (["sft", "--config", "{tmp}/tab.yaml"], r"line 2, column 1.* Indent with spaces, not with tabs\."),
    "bad YAML": (["sft", "--config", "{tmp}/bad.yaml"], "bad.yaml' is not YAML"),
    "a name twice in YAML": (["sft", "--config", "{tmp}/twice.yaml"], "is not YAML: 'optim' is given twice at line 4"),
    "YAML that is no UTF-8": (["sft", "--config", "{tmp}/latin.yaml"], "latin.yaml' is not YAML: 'utf-8' codec can't decode"),
    "an output that is a folder": (
        ["eval", "--model", "none", "--dataset", "none.jsonl", "--reward", "exact", "--output", "{tmp}"],
        "cannot be written: Is a directory; name another file as --output",
    ),
    "an output that is in a file": (
        ["sample", "--model", "none", "--dataset", "none.jsonl", "--output", "{tmp}/bad.yaml/rows.jsonl"],
        "bad.yaml/rows.jsonl cannot be written: (File exists|Not a directory)",
    ),
    "scores that nobody can write": (
        ["score", "--model", "none", "--dataset", "none.jsonl", "--output", "{tmp}"],
        "cannot be written: Is a directory",
    ),
    "a list as YAML": (["sft", "--config", "{tmp}/list.yaml"], "holds a list; expected a mapping of names to values"),
    "unknown key": (["sft", "--config", "{tmp}/key.yaml"], "key.yaml: there is no setting 'learning_rat'.*'learning_rate'"),
    "a value for a section": (["sft", "optim=3"], "optim is 3; expected a mapping of names to values"),
    "a setting of a number": (
        ["sft", "optim.learning_rate.x=3"],
        "optim.learning_rate is {{'x': 3}}; expected a number",
    ),
    "no rows in a step": (["sft", "--batch-size", "0"], "batch_size is 0; expected at least 1"),
    "not a number": (["sft", "--learning-rate", ".nan"], "optim.learning_rate is nan; expected a finite number"),
    "not a number in a part": (
        ["grpo", "--reward", "exact", "--beta", ".nan"],
        "KL has coefficient=nan; expected a finite",
    ),
    "not a number in an agent's part": (
        ["control", "ppo", "--env", "CartPole-v1", "algorithm.psi.eps=.nan"],
        "whitened has eps=nan; expected a finite",
    ),
    "more than a float holds": (["demo", "--seed", "9" * 400], "expected a whole number"),
    "not a number in a loss": (["dpo", "--loss", "{{preset: dpo, margin: .inf}}"], "margin=inf; expected a finite number"),
    "not a number for the referee": (
        ["referee", "a.yaml", "b.yaml", "--tolerance", "nan"],
        "--tolerance is 'nan'; expected",
    ),
    "not a number for chat": (["chat", "x", "--temperature", "inf"], "--temperature is 'inf'; expected a finite number"),
    "negative": (["grpo", "--max-steps=-2"], "run.max_steps is -2; expected at least 0"),
    "missing data": (
        ["grpo", "--model", "{model}", "--dataset", "no.jsonl", "--reward", "exact", "--output-dir", "{tmp}/r"],
        "'?no.jsonl'?",
    ),
    "a dataset that is a number": (["sft", "--config", "{tmp}/number.yaml"], "number.yaml: data.dataset is 3; expected the name"),
    "unknown slot": (["grpo", "--reward", "exact", "algorithm.surogate=clip"], "'surogate'.*did you mean 'surrogate'"),
    "another method in the file": (
        ["rloo", "--reward", "exact", "--config", str(ROOT / "examples" / "grpo.yaml")],
        "The command is rloo, but the settings name the algorithm grpo; run `psigrad grpo`",
    ),
    "unknown preset": (["explain", "grop"], "grop is neither a method nor a warning.*did you mean 'grpo'"),
    "unknown warning": (["explain", "dead_group"], "dead_group is neither a method nor a warning.*did you mean 'dead_groups'"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    from tiny_jobs import make_job

    return make_job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_status_2(mistake, job, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("optim: {learning_rate: [\n")
    (tmp_path / "tab.yaml").write_text("model: m\n\tx: 1\n")
    (tmp_path / "number.yaml").write_text("data: {dataset: 3}\n")
    (tmp_path / "twice.yaml").write_text("optim:\n  learning_rate: 1.0e-3\nrun: {max_steps: 5}\noptim:\n  weight_decay: 0.1\n")
    (tmp_path / "latin.yaml").write_bytes("data: {dataset: café}\n".encode("latin-1"))
    (tmp_path / "unanswered.jsonl").write_text('{"prompt": "a", "completion": "b", "answer": null}\n' * 2)
    (tmp_path / "list.yaml").write_text("- optim\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "mine.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "key.yaml").write_text("optim: {learning_rat: 1}\n")
    arguments, expected = MISTAKES[mistake]
    expected = expected.replace("{{", r"\{").replace("}}", r"\}")
    places = {"tmp": tmp_path, "model": job / "base", "data": job / "train.jsonl"}
    assert cli.main([a.format(**places) for a in arguments]) == 2
    error = capsys.readouterr().err
    *begun, last = error.splitlines()
    assert re.search(expected, last) and last.startswith("psigrad: "), error
    assert not begun or "steps of" in begun[0], "a run that began says so first"
    assert "Traceback" not in error and "More:" not in error
    assert error.rstrip().endswith((".", "?"))


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def broken(arguments):
        raise ValueError("deep in a library")

    monkeypatch.setitem(cli.COMMANDS, "tasks", cli.Command("", broken))
    with pytest.raises(ValueError, match="deep in a library"):
        cli.main(["tasks"])


def test_a_library_of_an_extra_that_is_missing_is_named_with_the_extra(monkeypatch, capsys):
    for name, extra in (("uvicorn", "studio"), ("py3langid", "ifeval")):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(cli.COMMANDS, "tasks", flags.Command("", lambda given, name=name: importlib.import_module(name)))
        assert cli.main(["tasks"]) == 2
        said = capsys.readouterr().err
        assert f"needs {name}, which cannot be imported" in said and f"Run `{extras.install_command(extra)}`." in said
    monkeypatch.setitem(sys.modules, "not_there", None)
    monkeypatch.setitem(cli.COMMANDS, "tasks", flags.Command("", lambda given: importlib.import_module("not_there")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["tasks"])


def test_the_words_of_other_libraries_are_answered_with_the_command(capsys):
    for word, command in (
        ("train", "grpo"),
        ("Fine_Tune", "sft"),
        ("generate", "sample"),
        ("infer", "chat"),
        ("webui", "studio"),
    ):
        assert cli.main([word, "--model", "x"]) == 2
        said = capsys.readouterr().err
        assert f"There is no command '{word}'" in said and f"`psigrad {command}`" in said
    named = re.findall(r"`psigrad ([\w-]+)", " ".join(cli._PEERS.values()))
    assert set(named) <= set(cli.COMMANDS) and not {w for words in cli._PEERS for w in words.split()} & set(cli.COMMANDS)


def test_flags_beat_overrides_beat_the_file_beats_the_defaults(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("optim: {learning_rate: 1e-3, weight_decay: 0.5, adam_beta1: 0.7}\nreward: exact\n")
    config = flags.parse(
        OnlineConfig,
        "grpo",
        [
            "--config",
            str(file),
            "optim.learning_rate=2e-3",
            "optim.weight_decay=0.6",
            "--learning-rate",
            "3e-3",
            "--reward",
            "a",
            "b",
        ],
        defaults={"algorithm": "grpo"},
    )
    assert (config.optim.learning_rate, config.optim.weight_decay, config.optim.adam_beta1) == (3e-3, 0.6, 0.7)
    assert config.optim.adam_beta2 == 0.999 and config.reward == ("a", "b")


def test_parts_of_the_algorithm_are_overridden_by_dotted_name():
    config = flags.parse(
        OnlineConfig, "grpo", ["algorithm.kl=null", "algorithm.surrogate.high=0.28"], defaults={"algorithm": "grpo"}
    )
    assert config.algorithm == {"preset": "grpo", "kl": None, "surrogate": {"high": 0.28}}


def test_an_algorithm_of_the_users_own_may_be_named_by_an_override():
    config = flags.parse(OnlineConfig, "reinforce", ["algorithm=mine.py:METHOD"], defaults={"algorithm": "reinforce"})
    language.check_method("reinforce", config.algorithm)
    assert config.algorithm == "mine.py:METHOD"


def test_a_weight_below_zero_is_no_flag():
    for text, value in (("-0.5", -0.5), ("-1e-3", -0.001), ("-.5", -0.5), ("-2", -2.0)):
        config = flags.parse(OnlineConfig, "grpo", ["--reward", "a", "b", "--reward-weights", "1", text])
        assert config.reward_weights == (1.0, value)
        found = flags.parse_lists(["a", "--w", "1", text, "--x", text, "-y"], "--w")
        assert found == (["a"], {"--w": ["1", text]}, ["--x", text, "-y"])


def test_the_python_example_asks_for_a_run_that_could_start(monkeypatch, capsys):
    asked = {}

    def record(method, **settings):
        asked.update(settings, method=method)
        return Result(ROOT, ROOT / "model", None)

    monkeypatch.setattr(psigrad, "train", record, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "model", "prompts.jsonl"])
    runpy.run_path(str(ROOT / "examples" / "train.py"), run_name="__main__")
    assert asked.pop("method") == "grpo" and len(asked.pop("reward")) == 2
    known = resolve_names(OnlineConfig, {k: v for k, v in asked.items() if k not in ("model", "dataset")})
    assert load(OnlineConfig, flags=known).run.max_steps == 100


def test_every_shipped_example_is_tested():
    tested = {
        "grpo.yaml",
        "sft.yaml",
        "train.py",
        "grpo_in_one_file.py",
        "ppo_in_one_file.py",
        "programs.py",
        "sums.py",
        "rooms.py",
    }  # the last four elsewhere
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == tested


@pytest.mark.parametrize(("file", "cls"), [("grpo.yaml", OnlineConfig), ("sft.yaml", SFTConfig)])
def test_the_shipped_examples_load(file, cls):
    assert load(cls, ROOT / "examples" / file).run.output_dir.startswith("runs/")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("chat_template_kwargs", '{"enable_thinking": fals}'),
        ("chat_template_kwargs", '{"enable_thinking": false'),
        ("columns", '{"question": prompt}'),
        ("reward", '{"reward": length, "max_completion_length": 8}'),
        ("algorithm", '{"preset": grpo}'),
    ],
)
def test_what_begins_as_json_must_be_json(setting, text):
    """YAML would take `fals` for a word, and a template every word for true."""
    dotted = resolve_names(OnlineConfig, {setting: text})
    with pytest.raises(UserError, match=f"{setting}.*JSON"):
        load(OnlineConfig, overrides=[f"{next(iter(dotted))}={text}"])
    with pytest.raises(UserError, match=rf"--{setting.replace('_', '-')}.*JSON"):
        flags.parse(OnlineConfig, "grpo", [f"--{setting.replace('_', '-')}", text], defaults={"algorithm": "grpo"})


def test_python_settings_are_named_by_leaf_or_dotted_name():
    assert resolve_names(OnlineConfig, {"learning_rate": 1, "run.seed": 2}) == {"optim.learning_rate": 1, "run.seed": 2}
    with pytest.raises(UserError, match="did you mean 'learning_rate'"):
        resolve_names(OnlineConfig, {"learning_rat": 1})


def test_every_settings_class_is_frozen():
    for cls in CONFIGS:
        assert cls.__dataclass_params__.frozen
        for f in fields(cls):
            hint = get_type_hints(cls)[f.name]
            assert not is_dataclass(hint) or hint.__dataclass_params__.frozen


def test_the_public_names_are_there_and_lazy():
    names = {"Callback", "PolicyGradient", "__version__", "evaluate", "explain", "score", "train"}
    assert names == set(psigrad.__all__) == set(dir(psigrad))
    assert callable(psigrad.train) and callable(psigrad.explain)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        operator.attrgetter("trian")(psigrad)


def test_too_few_open_files_are_a_sentence(monkeypatch, capsys):
    def run(arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setitem(cli.COMMANDS, "tasks", cli.Command("", run))
    assert cli.main(["tasks"]) == 2
    assert re.fullmatch(
        r"psigrad: Too many open files: this process may open \d+ files; raise the limit .*\n", capsys.readouterr().err
    )
    monkeypatch.setitem(cli.COMMANDS, "tasks", cli.Command("", lambda arguments: (_ for _ in ()).throw(OSError(5, "I/O error"))))
    with pytest.raises(OSError, match="I/O"):  # a bug, or a broken disk, shows where
        cli.main(["tasks"])
