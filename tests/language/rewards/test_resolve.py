"""Every way to name a reward function, in this process and in a worker."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_jobs
import tiny_rewards
from inline_scorer import InlineScorer

from psigrad.errors import UserError
from psigrad.language.recipes import online, preference, scorers, sft
from psigrad.language.rewards import RewardSpec, builtin, resolve

ZOO = Path(__file__).with_name("zoo.py")
SCRIPT = """
from __future__ import annotations
from dataclasses import dataclass
import math
from psigrad.language.rewards import RewardPool, Failure, Samples, resolve

SCALE = 3.0

class Mine(Failure):
    pass

@dataclass(frozen=True)
class Scaled:
    by: float = 1.0
    def __call__(self, completions, **columns):
        return [self.by * helper(c) for c in completions]

def helper(text):
    return SCALE * math.floor(len(text))

def reward(completions, **columns):
    if completions == ["bad"]:
        raise Mine("bad")
    return [helper(c) for c in completions]

if __name__ == "__main__":
    fixed = lambda completions, **columns: [SCALE] * len(completions)
    with RewardPool([resolve(f) for f in (reward, Scaled(2.0), fixed)]) as pool:
        scoring = pool.begin()
        for text in ("ab", "bad"):
            scoring.add(Samples(["q"], [text], [[1]]))
        print(scoring.results())
"""


@pytest.mark.parametrize("name", builtin.NAMES)
def test_builtins_resolve_to_themselves(name):
    assert resolve(name) == RewardSpec(name, builtin.find_reward(name))


def test_a_spec_stays_what_it_is():
    spec = RewardSpec("mine", len)
    assert resolve(spec) is spec


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (math.floor, "floor"),
        (lambda completions: [], "<lambda>"),
        (functools.partial(math.pow, 2), "partial"),
        (builtin.Format(), "Format"),
        (f"{ZOO}:length", "length"),
        ("psigrad.language.rewards.builtin:exact", "exact"),
        ("psigrad.language.rewards.builtin.exact", "exact"),
        ({"reward": "soft_overlong", "soft_punish_cache": 8}, "soft_overlong"),
    ],
)
def test_names_for_the_log(given, name):
    assert resolve(given).name == name


def test_parameters_reach_a_builtin():
    assert resolve({"reward": "numeric", "tolerance": 0.5}).function == builtin.Numeric(0.5)
    assert resolve({"reward": f"{ZOO}:TWICE", "factor": 5.0}).function(["a"]) == [5.0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("exat", "no built-in reward 'exat'.*did you mean 'exact'"),
        (3, "is an int; give a name"),
        ({"tolerance": 1}, "has no 'reward'"),
        ({"reward": "numeric", "tolerance": math.inf}, "has tolerance=inf; expected a finite number"),
        ({"reward": "exact", "tolerance": 1}, "takes no parameters, but got tolerance"),
        ({"reward": "numeric", "tolerence": 1}, "no parameter 'tolerence'.*did you mean 'tolerance'"),
        ({"reward": "numeric", "tolerance": -1.0}, "tolerance is -1.0"),
        ({"reward": "format", "pattern": "("}, "is not a regular expression"),
        ({"reward": "length", "max_completion_length": 0}, "must be above 0"),
        ({"reward": "soft_overlong", "soft_punish_cache": 0}, "soft_punish_cache is 0"),
        ("no_such_module_at_all:f", "cannot be imported: ModuleNotFoundError"),
        ("psigrad.language.rewards.builtin:exat", "has no 'exat'.*did you mean 'exact'"),
        ("psigrad.language.rewards.builtin:NAMES", "is a dict; expected a function"),
        (":f", "':f' names a module or file, but no object in it; write module:name"),
        ("no_such_file.py:f", r"there is no file '.*/no_such_file\.py'; give the path"),
    ],
)
def test_mistakes_are_one_sentence(given, said):
    with pytest.raises(UserError, match=said):
        resolve(given)


@pytest.mark.parametrize("content", ["import sys; sys.exit(3)", "1 / 0", "def f(:", "import no_such_module_at_all"])
def test_a_file_that_does_not_import_is_one_sentence_and_leaves_nothing(content, tmp_path):
    (tmp_path / "mine.py").write_text(content)
    before = set(sys.modules)
    with pytest.raises(UserError, match=r"mine.py:f' cannot be imported: \w+: "):
        resolve(f"{tmp_path / 'mine.py'}:f")
    assert set(sys.modules) == before


def test_a_file_called_like_a_module_does_not_become_it(tmp_path):
    (tmp_path / "math.py").write_text("def f(completions, **columns):\n    return [7.0] * len(completions)\n")
    assert resolve(f"{tmp_path / 'math.py'}:f").function(["a"]) == [7.0]
    assert sys.modules["math"] is math


def closure(scale: float):
    def scaled(completions, **columns):
        return [scale * len(text) for text in completions]

    return scaled


WAYS = {
    "module:function": (lambda: resolve("psigrad.language.rewards.builtin:exact"), 0.0),
    "file.py:function": (lambda: resolve(f"{ZOO}:length"), 3.0),
    "file.py:object": (lambda: resolve(f"{ZOO}:TWICE"), 2.0),
    "method of an object in a file": (lambda: resolve(resolve(f"{ZOO}:TWICE").function.method), 20.0),
    "partial of a function in a file": (
        lambda: resolve(functools.partial(resolve(f"{ZOO}:positional_default").function, scale=4.0)),
        4.0,
    ),
    "function of a module": (lambda: resolve(tiny_rewards.constant), 1.0),
    "lambda": (lambda: resolve(lambda completions, **columns: [6.0] * len(completions)), 6.0),
    "closure": (lambda: resolve(closure(3.0)), 9.0),
    "partial": (lambda: resolve(functools.partial(tiny_rewards.lengths, extra=2.0)), 3.0),
    "frozen dataclass": (lambda: resolve(builtin.SoftOverlong(2, 1)), 0.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_functions_of_every_origin_run_in_a_worker(way, pool_of, score):
    make, expected = WAYS[way]
    spec = make()
    (result,) = score(pool_of(spec, timeout=60.0), ["abc"], answer=["xyz"])
    assert result.value == expected
    assert score(InlineScorer([spec]), ["abc"], answer=["xyz"]) == [result]


def test_functions_of_a_script_run_in_a_worker(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(builtin.__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "[Scored(value=21.0, parts={'reward': 6.0, 'Scaled': 12.0, '<lambda>': 3.0}), "
        "Failed(value=21.0, reason='reward: bad', parts={'reward': 0.0, 'Scaled': 18.0, '<lambda>': 3.0})]"
    )


RUNS = {
    "grpo": (online.run, tiny_jobs.online_config),
    "sft": (sft.run, tiny_jobs.sft_config),
    "dpo": (preference.run, tiny_jobs.preference_config),
}


@pytest.fixture
def imports(tmp_path):
    """imports(): how often this process has imported each of two files of rewards, a.py and b.py, in the folder `imports.of`."""
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(
            "import os\n"
            f"open({str(tmp_path / 'log')!r}, 'a').write(f'{name} {{os.getpid()}}\\n')\n"
            "def reward(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
        )

    def count():
        lines = (tmp_path / "log").read_text().splitlines()
        return {name: lines.count(f"{name} {os.getpid()}") for name in "ab"}

    count.of = tmp_path
    return count


def run_with(kind, job, imports):
    run, make = RUNS[kind]
    config = make(job, imports.of / "run", max_steps=1)
    evaluation = replace(config.evaluation, metric=f"{imports.of / 'b.py'}:reward")
    sampling = replace(config.sampling, max_completion_length=4)
    run(replace(config, reward=(f"{imports.of / 'a.py'}:reward",), evaluation=evaluation, sampling=sampling))


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_resolves_a_reward_once(kind, job, imports):
    run_with(kind, job, imports)
    assert imports() == {"a": 1, "b": 1}


def test_negative_control_a_second_resolve_would_be_noticed(job, imports, monkeypatch):
    monkeypatch.setattr(scorers, "resolve", lambda given: resolve(given) and resolve(given))
    run_with("grpo", job, imports)
    assert imports() == {"a": 2, "b": 2}


def test_rewards_of_trl_go_by_their_bare_names():
    from trl.rewards import accuracy_reward

    found = resolve("accuracy_reward")
    assert (found.name, found.function) == ("accuracy_reward", accuracy_reward)
