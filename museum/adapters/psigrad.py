"""psigrad's values. This is the only file of the museum that imports psigrad."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from safetensors.torch import load_file

import psigrad
from museum import worlds
from psigrad import control
from psigrad.config.sections import Optim
from psigrad.control.environments import collector, vector
from psigrad.control.methods import on_policy
from psigrad.errors import UserError
from psigrad.language import examples
from psigrad.language.data import pairs, templates
from psigrad.language.data.dataset_rows import Row
from psigrad.language.models import language_model, packing, scalar_model
from psigrad.language.rollout import types
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.training.offline import reward_task, sft_task
from psigrad.language.training.online import batching, collect
from psigrad.objective import Batch, PolicyGradient, terminal
from psigrad.objective.parts import advantage, aggregate, ratio, surrogate
from psigrad.objective.preferences.reward_model import BradleyTerry
from psigrad.optim import Optimizer

NOT_APPLICABLE: dict[str, str] = {}
_GROUPED = PolicyGradient(advantage.group_mean(std=False), ratio.token, surrogate.clip(), aggregate.token_mean)


def _model(network: Any = None) -> language_model.LanguageModel:
    return language_model.prepare(worlds.unigram() if network is None else network, worlds.words())


def _logits(model: Any) -> list[float]:
    return worlds.logit_gradient(model.network.lm_head.weight.grad)


def _task(network: Any, rows: list[tuple[list[int], list[bool]]]) -> sft_task.SFTTask:
    return sft_task.SFTTask(_model(network), [[examples.Example(ids, mask, False)] for ids, mask in rows])


def accumulated_tokens(x: SimpleNamespace) -> list[float]:
    task = _task(None, x.rows)
    losses = [share() for share in task.shares(range(len(x.rows)), budget=4)]
    for loss in losses:
        loss.value.backward()
    total = sum(float(loss.value.detach()) for loss in losses)
    return [total / worlds.LN2, _logits(task.model)[worlds.B], _logits(task.model)[worlds.D]]


def evaluation_loss(x: SimpleNamespace) -> list[float]:
    return [_task(None, x.rows).held_out(budget=4)["loss"] / worlds.LN2]


def token_normaliser(x: SimpleNamespace) -> list[float]:
    model, count = _model(), len(x.completions)
    mask, reward = torch.ones(count, 2, dtype=torch.bool), torch.tensor(x.rewards)
    logp = model.evaluate(packing.Groups([[worlds.A]], [x.completions])).logp.detach()
    prepared = _GROUPED.prepare(Batch(mask, terminal(reward, mask), logp, torch.arange(count) // 2), {})
    for rows in torch.arange(count).chunk(2):
        outputs = model.evaluate(packing.Groups([[worlds.A]], [[x.completions[i] for i in rows]]))
        part = prepared.select(rows)
        _GROUPED.loss(part, outputs, _GROUPED.totals(part), {}).value.backward()
    return [_logits(model)[worlds.A]]


def unscored_reward(x: SimpleNamespace, method: PolicyGradient = _GROUPED) -> list[float]:
    rows = []
    for k, (ids, reward) in enumerate(zip(x.completions, x.rewards, strict=True)):
        done = types.Completion(tuple(ids), (-1.0,) * len(ids), (-1.0,) * len(ids), "stop", k)
        rows.append(types.Trajectory(0, k, (worlds.A,), done, 0, reward=reward))
    kept = list(collect.group_scored(rows, len(rows), method.min_group_size))
    found = method.prepare(batching.to_batch(kept), {}).advantage[:, 0].tolist()
    known = dict(zip((t.k for t in kept[0]), found, strict=True))
    return [known.get(k, 0.0) for k in range(len(rows))]


def equal_rewards(x: SimpleNamespace) -> list[float]:
    return unscored_reward(x, replace(_GROUPED, psi=advantage.group_mean()))


def temperature(x: SimpleNamespace) -> list[float]:
    found: list[float] = (
        _model().evaluate(packing.Groups([x.prompt], [[x.completion]]), temperature=x.temperature).logp[0].tolist()
    )
    return found


def left_padding(x: SimpleNamespace) -> list[float]:
    model = _model(worlds.random_model("gpt2"))
    batch, alone = (model.evaluate(packing.Groups(p, [[x.completion]] * len(p))).logp[0] for p in (x.prompts, x.prompts[:1]))
    return [float((batch - alone).abs().max().detach())]


def kl_gradient(x: SimpleNamespace) -> list[float]:
    kl = ratio.KL("loss", "k3", 1.0, importance_weighted=True)  # False: the GRPO paper's term, with the wrong gradient
    method = replace(_GROUPED, aggregate=aggregate.sequence_mean, kl=kl)
    model, mask = _model(worlds.unigram(uniform=True)), torch.ones(8, 1, dtype=torch.bool)
    outputs = model.evaluate(packing.Groups([x.prompt], [[[v] for v in range(8)]]))
    reference, same = torch.tensor(x.reference)[:, None], torch.zeros(8, dtype=torch.int64)
    prepared = method.prepare(Batch(mask, torch.zeros(8, 1), outputs.logp.detach(), same, logp_ref=reference), {})
    method.loss(prepared, outputs, method.totals(prepared), {}).value.backward()
    return [_logits(model)[v] for v in x.at]


def reward_at_end(x: SimpleNamespace) -> list[float]:
    tokenizer = worlds.words(None, pad="<eos>")
    prompt, chosen, rejected = (" ".join(worlds.WORDS[i] for i in ids) for ids in (x.prompt, x.chosen, x.rejected))
    made = pairs.encode_pair(tokenizer, Row("row 1", prompt, f" {chosen}", rejected=f" {rejected}"))
    task = reward_task.RewardTask(scalar_model.prepare(worlds.unigram("score"), tokenizer), BradleyTerry(), [made])
    return [float(share().value.detach()) for share in task.shares([0], 64)]


def bfloat16_updates(x: SimpleNamespace) -> list[float]:
    task = _task(worlds.random_model("llama").bfloat16(), x.rows)
    optimizer = Optimizer(task.model.trainable(), Optim())
    for _ in range(x.steps):
        optimizer.step([lambda: task.shares([0], 64)[0]().value], x.rate)
    return [float((task.model.trainable()["model.norm.weight"] - 1).abs().max())]


def resumed_run(x: SimpleNamespace) -> list[float]:
    class Stop(psigrad.Callback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.step > x.stop:
                raise RuntimeError("stopped")

    rows = [{"prompt": worlds.WORDS[ids[0]], "completion": " ".join(worlds.WORDS[i] for i in ids[1:])} for ids, _ in x.rows]
    given: dict[str, Any] = {"lora_rank": 2, "lora_dropout": 0.5, "batch_size": 1, "max_steps": x.steps, "save_steps": x.stop}
    given |= {"learning_rate": x.rate, "eval_prompts": 0, "report": False, "dataset": rows, "plain_prompts": True}
    ends: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in (worlds.random_model("llama"), worlds.words()):
            part.save_pretrained(Path(folder) / "base")
        for name, callbacks in (("once", []), ("resumed", [Stop()]), ("resumed", [])):
            with contextlib.suppress(UserError):
                where = {"model": Path(folder) / "base", "output_dir": Path(folder) / name}
                done = psigrad.train("sft", callbacks=callbacks, **where, **given)
                ends.append(load_file(Path(done.model) / "adapter_model.safetensors"))
    return [max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0])]


def eos_as_padding(x: SimpleNamespace) -> list[float]:
    made = [templates.example(worlds.words(pad="<eos>"), Row("row", completion=text)) for text in x.texts]
    return [sum(wanted and i == worlds.EOS for one in made for i, wanted in zip(one.ids, one.mask, strict=True))]


def _example(x: SimpleNamespace) -> examples.Example:
    return templates.example(worlds.words(x.template, adds_bos=True), Row("row 1", messages=x.turns))


def assistant_mask(x: SimpleNamespace) -> list[float]:
    made = _example(x)
    return [sum(wanted and i in x.users for i, wanted in zip(made.ids, made.mask, strict=True))]


def unmarked_template(x: SimpleNamespace) -> list[float]:
    return [sum(_example(x).mask)]


def doubled_bos(x: SimpleNamespace) -> list[float]:
    return [_example(x).ids.count(worlds.BOS)]


def merged_boundary(x: SimpleNamespace) -> list[float]:
    row = Row("row 1", x.prompt, x.completion)
    assert templates.prompt_ids(worlds.merging(), row) == x.context
    return [sum(a != b for a, b in zip(templates.example(worlds.merging(), row).ids, x.context, strict=False))]


def second_end_token(x: SimpleNamespace) -> list[float]:
    rows: list[types.Trajectory] = []
    for first, last in x.completions:
        network = worlds.unigram()
        network.generation_config.eos_token_id = x.ends
        with torch.no_grad():  # c is followed by the first token, and that by the last
            network.lm_head.weight[first, worlds.C] = network.lm_head.weight[last, first] = 99.0
        model = _model(network)
        params = types.SamplingParams(x.limit, stop_token_ids=model.eos_token_ids)
        (done,) = EmbeddedSampler(model).sample([types.Request((worlds.C,), (0,))], params)[0]
        rows.append(types.Trajectory(0, len(rows), (worlds.C,), done, 0, reward=1.0))
    prepared = replace(_GROUPED, keep=(aggregate.not_truncated,)).prepare(batching.to_batch([rows]), {})
    return [float(count) for count in prepared.batch.mask.sum(1) * prepared.keep]


def packed_attention(x: SimpleNamespace) -> list[float]:
    model, mask = _model(worlds.random_model(x.kind)), [False, True, True, True]
    both = model.evaluate(packing.Rows([x.first, x.second], [mask, mask])).logp[1]
    return [float((both - model.evaluate(packing.Rows([x.second], [mask])).logp[0]).abs().max().detach())]


packed_state = packed_attention


def packed_targets(x: SimpleNamespace) -> list[float]:
    rows = packing.Rows(x.texts, [[place > 0 for place in range(len(ids))] for ids in x.texts])
    return [len(packing.pack(rows).targets.ids)]


def time_limit(x: SimpleNamespace) -> list[float]:
    given: dict[str, Any] = {"n_steps": x.limit, "gamma": x.gamma, "gae_lambda": 0.0, "normalize_advantage": False}
    trainer: Any = control.A2C(lambda: worlds.Steps(x.limit), tuned=False, n_envs=1, critic="separate", **given)._trainer
    trainer.collector.restart(0)
    trainer.network.flat.data.zero_()
    trainer.network.towers.named()["1.2.bias"].fill_(x.value)
    rollout = trainer._collect()
    seen = on_policy.as_tensors(rollout, True)
    forward, now = trainer._pass(seen.observation, seen.action, False, False)
    return [float(a) for a in trainer._prepare(trainer.algorithm, rollout, seen, forward.output, now, False).advantage[0]]


def reused_array(x: SimpleNamespace) -> list[float]:
    return [float(number) for number in _rollout(x, x.limit, False)[1].after[0]]


def _replay(env: worlds.Steps, steps: int, **settings: Any) -> Any:
    given: dict[str, Any] = {"batch_size": 32, "learning_starts": 16, "train_freq": 4, "total_timesteps": 1000, "n_envs": 1}
    agent: Any = control.DQN(lambda: env, tuned=False, net_arch=(8,), **given, **settings).learn(steps)
    return agent._trainer.draw(256, np.random.default_rng(0))


def normalised_bytes(x: SimpleNamespace) -> list[float]:
    env = worlds.Steps(x.limit, gym.spaces.Box(0, 10, x.shape, np.uint8))
    seen = _replay(env, x.steps, normalize_observations=True).observation.float()
    return [float(seen.mean()), float(seen.abs().max())]


def replayed_scale(x: SimpleNamespace) -> list[float]:
    rewards = _replay(worlds.Steps(x.limit), x.steps, normalize_rewards=True, gamma=x.gamma).reward
    return [float(rewards.max() / rewards.min())]


def discrete_start(x: SimpleNamespace) -> list[float]:
    env = worlds.Steps(8, actions=gym.spaces.Discrete(x.count, start=x.start))
    control.A2C(lambda: env, n_envs=1, n_steps=8, tuned=False).learn(x.steps)
    return [sum(not env.action_space.contains(np.int64(action)) for action in env.received)]


def _rollout(x: SimpleNamespace, steps: int, scale: bool, gamma: float = 1.0) -> tuple[collector.Collector, Any]:
    envs = vector.make(lambda: worlds.Steps(x.limit))
    made = collector.Collector(envs, collector.Normalizer(envs.size, 1, gamma, False, scale))
    made.restart(0)
    return made, made.steps(lambda seen: np.zeros(len(seen), np.int64), steps)


def reward_scale(x: SimpleNamespace) -> list[float]:
    return [float(_rollout(x, x.steps, True, x.gamma)[1].reward[-1])]


def episode_length(x: SimpleNamespace) -> list[float]:
    return _rollout(x, 3 * x.limit, False)[0].statistics.numbers()["lengths"]
