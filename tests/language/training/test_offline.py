"""Offline tasks: any split is the same step, references come once and from the right model, and learning happens."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from in_memory import advance, log_of
from offline_tasks import step, task_of

from psigrad import cli
from psigrad.config import Optim, Run, SFTConfig
from psigrad.language.models.lora import DropoutMasks
from psigrad.language.rollout.types import State
from psigrad.language.training.offline import offline
from psigrad.language.training.offline.offline import OfflineRun
from psigrad.objective import Loss
from psigrad.objective.preferences.preference_catalog import METHODS as LOSSES
from psigrad.optim import Optimizer

pytestmark = pytest.mark.usefixtures("rewards_here")


@pytest.mark.parametrize("kind", [*LOSSES, "reward", "process"])
def test_any_split_into_forward_passes_is_the_same_step(kind, job, model):
    task, learner = task_of(kind, job, model, apart=0.1)
    parameters = list(learner.trainable().values())
    whole = step(task, parameters, 1 << 20)
    assert float(whole[2].abs().max()) > 1e-6
    for budget in (12, 30):
        part = step(task, parameters, budget)
        assert part[0] == pytest.approx(whole[0], abs=1e-5)
        assert part[1] == pytest.approx(whole[1], abs=1e-4)
        assert float((part[2] - whole[2]).abs().max()) < 1e-4 * float(whole[2].abs().max())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["dpo", "--model", "{base}", "--dataset", "{judged}"], "chosen"),
        (["kto", "--model", "{base}", "--dataset", "{train}"], "completion"),
        (["dpo", "--model", "{base}", "--dataset", "{pairs}", "--max-length", "2"], "more than max_length 2"),
        (["simpo", "--model", "{base}", "--dataset", "{pairs}", "--reference", "{base}"], "uses none"),
        (["dpo", "--model", "{base}", "--dataset", "{pairs}", "loss.beta=0"], "above 0"),
        (["ipo", "--model", "{base}", "--dataset", "{pairs}", "loss=dpo"], "psigrad dpo"),
        (["reward", "--dataset", "{pairs}"], "No model was given"),
        (["reward", "--model", "{base}", "--dataset", "{train}"], "chosen"),
        (["score", "--model", "{base}", "--dataset", "{train}"], "without a trained scalar head"),
        (["score", "--dataset", "{train}"], "No reward model was given"),
    ],
)
def test_a_users_mistake_is_one_sentence(command, said, job, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = {name: job / f"{name}.jsonl" for name in ("train", "pairs", "judged")} | {"base": job / "base"}
    arguments = [part.format(**named) for part in command]
    if "--eval-prompts" not in arguments and command[0] != "score":
        arguments += ["--eval-prompts", "4"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error and error.startswith("psigrad: ")


class Asked:
    """A task that remembers which rows each step asked for."""

    name = "rows"
    model = SimpleNamespace(load_balancing=None, dropout_masks=DropoutMasks())

    def __init__(self, weight):
        self.weight, self.asked = weight, []

    def __len__(self):
        return 6

    def tokens(self, rows):
        return len(rows)

    def shares(self, rows, budget, ranks=1):
        self.asked.append(list(rows))
        return [lambda: Loss((self.weight * len(rows)).sum(), {"loss": torch.tensor(1.0)})]


def test_three_steps_of_two_rows_are_an_epoch_of_six():
    weight = torch.nn.Parameter(torch.zeros(1))
    task, optim = Asked(weight), Optim(learning_rate=0.1)
    run = OfflineRun(SFTConfig(batch_size=2, optim=optim), task, None, Optimizer({"w": weight}, optim), 6)
    state = State()
    for _ in range(6):
        state = advance(run, state, offline.step)
    first, second = task.asked[:3], task.asked[3:]
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == [*range(6)] and first != second
    assert [row["epoch"] for row in log_of(run).rows] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    assert Run(num_train_epochs=2).steps(10, 4) == 5, "every step takes four rows, as docs/porting.md says"
