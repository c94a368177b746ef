"""The single-file PPO of examples/ and the library: same advantages, same loss, same gradient, same weights after an update, on a
language model and on CartPole; and it learns both.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import scripts
import torch

from psigrad.config import OnlineConfig
from psigrad.config.algorithms import resolve
from psigrad.config.methods import declaration
from psigrad.control import builder
from psigrad.control.methods.on_policy import as_tensors
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.objective import Batch, PolicyOutputs, terminal

NOTICED = 1e-3


@pytest.fixture(scope="module")
def one_file():
    return scripts.load("examples/ppo_in_one_file.py")


def noise(shape, seed, scale=0.3):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differences(one, other, parameters):
    """The largest difference of the advantages, the returns, the losses and the gradients."""
    gradients = [torch.autograd.grad(found.loss, parameters, retain_graph=True) for found in (one, other)]
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("advantage", "returns", "loss")]
    pairs += list(zip(*gradients, strict=True))
    return [float((a - b).detach().abs().max()) for a, b in pairs]


# A language model


@pytest.fixture(scope="module")
def language(one_file):
    """A batch of completions by the library, and a function that gives the one file's for some settings."""
    tokenizer = tiny.tokenizer(["hello"], 270)
    model, reference = (prepare(tiny.model("qwen3", len(tokenizer), seed=seed).double(), tokenizer) for seed in (0, 1))
    model.add_value_head()
    model.value_head = torch.nn.Linear(64, 1).double()
    with torch.no_grad():
        model.value_head.weight.copy_(noise((1, 64), 0))
    rng = random.Random(0)
    prompts = [[rng.randrange(260) for _ in range(rng.randint(2, 7))] for _ in range(8)]
    completions = [[rng.randrange(260) for _ in range(rng.randint(1, 9))] for _ in prompts]
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 1.0, 0.0], dtype=torch.float64)
    lengths = torch.tensor([len(c) for c in completions])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]

    def library(moved):
        groups = Groups(prompts, [[c] for c in completions])
        now = model.evaluate(groups, value=True)
        batch = Batch(
            mask=mask,
            reward=terminal(scores, mask),
            logp_old=now.logp.detach() + moved * noise(mask.shape, 1),
            group=torch.arange(len(prompts)),
            logp_ref=reference.evaluate(groups).logp.detach(),
            value=now.value.detach() + moved * noise(mask.shape, 2),
        )
        ppo = resolve("ppo")
        prepared = ppo.prepare(batch, ppo.initial_state())
        loss = ppo.loss(prepared, now, ppo.totals(prepared), prepared.state).value
        return SimpleNamespace(advantage=prepared.advantage[mask], returns=prepared.returns[mask], loss=loss), batch

    def single(batch, settings):
        hf = model.network
        logp, value, written = one_file.evaluate_text(hf, model.value_head, prompts, completions)
        logp_ref, _, _ = one_file.evaluate_text(reference.network, model.value_head, prompts, completions)
        old = logp.detach().masked_scatter(written, batch.logp_old[mask])
        value_old = value.detach().masked_scatter(written, batch.value[mask])
        made = one_file.text_batch(old, logp_ref.detach(), value_old, written, scores, settings)
        loss = one_file.loss_of(made, logp, value, settings)
        return SimpleNamespace(advantage=made.advantage[written], returns=made.returns[written], loss=loss)

    return SimpleNamespace(library=library, single=single, parameters=list(model.trainable().values()))


@pytest.mark.parametrize("moved", [0, 1], ids=["on_policy", "off_policy"])
def test_on_a_language_model_it_equals_the_library(one_file, language, moved):
    ours, batch = language.library(moved)
    theirs = language.single(batch, one_file.LANGUAGE)
    assert max(differences(ours, theirs, language.parameters)) < 1e-9


@pytest.mark.parametrize("wrong", [{"lam": 0.95}, {"gamma": 0.99}, {"value_clip": None}, {"value_weight": 0.2}, {"clip": 0.3}])
def test_negative_control_another_setting_of_a_language_model_is_noticed(one_file, language, wrong):
    ours, batch = language.library(1)
    theirs = language.single(batch, replace(one_file.LANGUAGE, **wrong))
    assert max(differences(ours, theirs, language.parameters)) > NOTICED


def test_the_settings_of_a_language_model_are_the_librarys(one_file):
    config, ppo = OnlineConfig(**declaration("ppo").defaults), resolve("ppo")
    own = one_file.LANGUAGE
    assert (own.epochs, own.learning_rate, own.max_grad_norm) == (
        config.num_iterations,
        config.optim.learning_rate,
        config.optim.max_grad_norm,
    )
    assert config.optim.lr_scheduler_type == "linear" and config.optim.weight_decay == 0 and config.num_minibatches == 1
    assert (config.prompts_per_step, config.num_generations) == (one_file.PROMPTS_PER_STEP, 1)
    assert config.sampling.max_completion_length == one_file.MAX_NEW_TOKENS and ppo.kl.coefficient == one_file.BETA


# CartPole


def settings_of_control(**given):
    return builder.settings("ppo", "CartPole-v1", given)


@pytest.fixture(scope="module")
def cartpole(one_file):
    """Rows of steps in which episodes end, or are cut by the clock, at chance places; the library has a row for each episode."""
    shape, ppo = (4, 12), builder.resolve(settings_of_control())
    torch.manual_seed(0)
    network = one_file.ActorCritic(4, 2).double()
    seen, after = noise((*shape, 4), 3, 1.0), noise((*shape, 4), 4, 1.0)
    action, reward = noise(shape, 5).gt(0).long(), noise(shape, 6, 1.0)
    terminated, cut = noise(shape, 7).gt(0.35), noise(shape, 8).gt(0.35)
    last = terminated | cut
    last[:, -1] = True
    assert (terminated & last).any() and (last & ~terminated)[:, :-1].any()
    with torch.no_grad():
        logp, value = network.evaluate(seen, action)
        logp_old, value_old = logp + noise(shape, 9), value + noise(shape, 10)
        behind = torch.where(terminated, 0.0, network.value(after))
    value_after = torch.where(last, behind, torch.nn.functional.pad(value_old[:, 1:], (0, 1)))

    ends = last.flatten().nonzero()[:, 0].tolist()
    pieces = [slice(a + 1, b + 1) for a, b in zip([-1, *ends[:-1]], ends, strict=True)]

    def rows(x):
        return torch.nn.utils.rnn.pad_sequence([x.flatten()[piece] for piece in pieces], batch_first=True)

    def library():
        mask = rows(torch.ones(shape, dtype=torch.bool))
        last_value = value_after.flatten()[ends]
        group = torch.zeros(len(pieces), dtype=torch.long)
        batch = Batch(mask, rows(reward), rows(logp_old), group, value=rows(value_old), last_value=last_value)
        prepared = ppo.prepare(batch, ppo.initial_state())
        logp_now, value_now = network.evaluate(seen, action)
        now = PolicyOutputs(rows(logp_now), value=rows(value_now))
        loss = ppo.loss(prepared, now, ppo.totals(prepared), prepared.state).value
        return SimpleNamespace(advantage=prepared.advantage[mask], returns=prepared.returns[mask], loss=loss)

    def single(settings, value_after=value_after, stops=last):
        whole = torch.ones(shape, dtype=torch.bool)
        made = one_file.make_batch(whole, logp_old, reward, value_old, value_after, stops, settings)
        loss = one_file.loss_of(made, *network.evaluate(seen, action), settings)
        return SimpleNamespace(advantage=made.advantage.flatten(), returns=made.returns.flatten(), loss=loss)

    without_bootstrap = torch.where(last, 0.0, value_after)
    return SimpleNamespace(
        library=library,
        single=single,
        parameters=list(network.parameters()),
        wrong={"no value behind a cut": {"value_after": without_bootstrap}, "sums over ends": {"stops": torch.zeros_like(last)}},
    )


def test_on_cartpole_it_equals_the_library(one_file, cartpole):
    assert max(differences(cartpole.library(), cartpole.single(one_file.CARTPOLE), cartpole.parameters)) < 1e-9


@pytest.mark.parametrize("wrong", [{"lam": 0.95}, {"gamma": 0.99}, {"value_clip": 0.2}, {"value_weight": 0.5}, {"clip": 0.3}])
def test_negative_control_another_setting_of_cartpole_is_noticed(one_file, cartpole, wrong):
    theirs = cartpole.single(replace(one_file.CARTPOLE, **wrong))
    assert max(differences(cartpole.library(), theirs, cartpole.parameters)) > NOTICED


@pytest.mark.parametrize("wrong", ["no value behind a cut", "sums over ends"])
def test_negative_control_a_wrong_end_of_an_episode_is_noticed(one_file, cartpole, wrong):
    theirs = cartpole.single(one_file.CARTPOLE, **cartpole.wrong[wrong])
    assert max(differences(cartpole.library(), theirs, cartpole.parameters)) > NOTICED


def test_an_update_on_the_librarys_own_rollouts_gives_the_librarys_weights(one_file, monkeypatch):
    """Twice 20 passes of `psigrad control ppo`: the optimiser, its clip and the rate that falls are the same too."""
    trainer = builder.build(settings_of_control(seed=3))
    trainer.restart()
    rollouts, collect = [], trainer.collector.steps
    monkeypatch.setattr(trainer.collector, "steps", lambda *given: rollouts.append(collect(*given)) or rollouts[-1])
    network = one_file.ActorCritic(4, 2)
    before = {name: x.clone() for name, x in as_modules(trainer.network.towers.named()).items()}
    network.load_state_dict(before)
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5)
    assert (trainer.config.n_envs, trainer.config.n_steps) == (one_file.ENVS, one_file.STEPS_PER_ENV)
    for _ in range(2):
        trainer.iterate()
        rollout = rollouts[-1]
        seen = as_tensors(rollout, bootstrap=False)
        mask = seen.wide(torch.ones(seen.steps, dtype=torch.bool))
        last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
        with torch.no_grad():
            logp, value = (seen.wide(x) for x in network.evaluate(seen.observation, seen.action))
            behind = torch.where(torch.from_numpy(rollout.terminated), 0.0, network.value(torch.from_numpy(rollout.after)))
        value_after = torch.where(last, behind[:, None], torch.nn.functional.pad(value[:, 1:], (0, 1)))
        left = 1 - trainer.timesteps / trainer.config.total_timesteps
        own = one_file.CARTPOLE
        settings = replace(own, learning_rate=own.learning_rate * left, clip=own.clip * left)
        reward = seen.wide(torch.from_numpy(rollout.reward).float())
        batch = one_file.make_batch(mask, logp, reward, value, value_after, last, settings)
        one_file.update(
            batch,
            lambda seen=seen: tuple(map(seen.wide, network.evaluate(seen.observation, seen.action))),
            optimizer,
            settings,
        )
    after = as_modules(trainer.network.towers.named())
    assert max(float((after[name] - x).abs().max()) for name, x in before.items()) > 1e-2, "it did move"
    for name, x in network.state_dict().items():
        assert torch.allclose(x, after[name], atol=1e-5), name


def as_modules(named):
    """The library's weights under the names of the one file: "tower.layer.weight" is "policy.place.weight"."""
    found = {}
    for name, x in named.items():
        tower, layer, what = name.split(".")
        found[f"{('policy', 'critic')[int(tower)]}.{2 * int(layer)}.{what}"] = x
    return found


# It learns


def test_it_learns_to_hold_the_pole(one_file):
    returns = one_file.train_cartpole(8192)
    first, last = sum(returns[:20]) / 20, sum(returns[-20:]) / 20
    assert first < 40 and last > 80, (first, last)


def test_a_language_model_learns_to_say_a_token(one_file, monkeypatch):
    model = tiny.model("qwen3", 20, hidden=32, layers=1, heads=2, max_length=64)
    monkeypatch.setattr(one_file, "MAX_NEW_TOKENS", 6)
    torch.manual_seed(0)
    wanted, prompts = 7, [[5] * n for n in range(2, 18)]

    def score(_, completion):
        return completion.count(wanted) / len(completion)

    settings = replace(one_file.LANGUAGE, learning_rate=1e-2)
    shares = one_file.train_language_model(model, 0, prompts, score, 30, settings)
    assert sum(shares[:3]) / 3 < 0.15 and sum(shares[-3:]) / 3 > 0.6, shares


def test_its_command_reads_prompts_and_leaves_a_model(one_file, monkeypatch, tmp_path, capsys):
    tokenizer = tiny.tokenizer(["hello"], 270)
    model = tiny.model("llama", len(tokenizer), hidden=32, layers=1, heads=2)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello", "answer": "a"}\n{"prompt": "hello hello", "answer": "b"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(one_file, "MAX_NEW_TOKENS", 4)
    one_file.main("model", "prompts.jsonl", 2)
    assert "step    2  reward" in capsys.readouterr().out
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "ppo_model").iterdir()}


def test_it_samples_behind_each_prompt_alone_what_its_loss_can_read(one_file, monkeypatch):
    tokenizer = tiny.tokenizer(["hello"], 270)
    model = tiny.model("qwen3", len(tokenizer)).eval()
    monkeypatch.setattr(one_file, "MAX_NEW_TOKENS", 5)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    torch.manual_seed(0)
    completions = one_file.sample(model, prompts, tokenizer.eos_token_id)
    assert all(1 <= len(c) <= 5 and tokenizer.eos_token_id not in c[:-1] for c in completions)
    logp, _, mask = one_file.evaluate_text(model, torch.nn.Linear(64, 1), prompts, completions)
    for n, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        alone = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = alone[torch.arange(len(completion)), torch.tensor(completion)]
        assert torch.allclose(logp[n][mask[n]], expected, atol=1e-5)
