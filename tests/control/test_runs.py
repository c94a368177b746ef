"""`psigrad control` and the agents: run folders, bitwise resume, saved policies, mistakes as sentences."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from cases import slow
from control_worlds import commanded
from PIL import Image
from resuming import digest, dying_at
from tiny_jobs import forked

from psigrad import cli
from psigrad.config.fields import help_of
from psigrad.control import (
    DQN,
    PPO,
    Agent,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
    builder,
    evaluate_policy,
    run,
)
from psigrad.control.environments.collector import Collector
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.objective import catalog
from psigrad.records import run_folder

SMALL = {"eval_episodes": 4, "eval_steps": 2, "report": False, "progress": False, "save_steps": 2, "log_interval": 1}
METHODS = {
    "ppo": {"n_steps": 16, "n_epochs": 2, "n_envs": 2, "total_timesteps": 256, "batch_size": 16},
    "ppo_penalty": {"n_steps": 32, "n_epochs": 2, "n_envs": 2, "total_timesteps": 400, "batch_size": 0},
    "a2c": {"n_steps": 8, "n_envs": 2, "total_timesteps": 160, "normalize_observations": True, "normalize_rewards": True},
    "reinforce": {"total_timesteps": 800, "n_envs": 2},
    "trpo": {"n_steps": 32, "n_envs": 2, "total_timesteps": 400},
    "dqn": {"learning_starts": 32, "train_freq": 16, "gradient_steps": 2, "total_timesteps": 240, "target_update_interval": 24},
}


def config_of(name, output, **given):
    made = builder.settings(name, "CartPole-v1", {**SMALL, "tuned": True, **METHODS[name], **given})
    return replace(made, run=replace(made.run, output_dir=str(output), seed=3))


def digest_of(folder):
    """What must not depend on being killed; the optimiser and all else are in the newest checkpoint."""
    found = digest(folder)
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return {**found, **{p.name: p.read_bytes() for p in sorted(newest.iterdir()) if p.name != "manifest.json"}}


@pytest.fixture(
    scope="module", params=[pytest.param(m, marks=pytest.mark.slow if m in ("ppo_penalty", "reinforce") else ()) for m in METHODS]
)
def whole(request, tmp_path_factory):
    """A run that nobody disturbed."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)

    def work():
        seen: list[str] = []
        watch(0, seen)
        run.run(config_of(name, folder / "run"))
        (folder / "events").write_text("\n".join(seen))

    assert forked(work) == 0
    return name, digest_of(folder / "run"), (folder / "events").read_text().splitlines()


def watch(count, seen=None):
    """Events of control besides those of every run: steps of the collector and rows of the run folder."""
    import resuming

    resuming.EVENTS = (*resuming.EVENTS, (Collector, "_collect"), (run_folder.RunFolder, "event"))
    dying_at(count, seen)


@pytest.mark.parametrize("index", [0, *slow(1, 2, 3)])
def test_a_killed_run_resumes_bitwise(index, whole, tmp_path):
    name, expected, events = whole
    point = random.Random(index).randrange(1, len(events))

    def doomed():
        watch(point)
        run.run(config_of(name, tmp_path / "run"))

    status = forked(doomed)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"the kill at event {point} did not land"
    assert forked(lambda: run.run(config_of(name, tmp_path / "run"))) == 0
    assert digest_of(tmp_path / "run") == expected


def test_negative_control_another_seed_gives_another_run(whole, tmp_path):
    name, expected, _ = whole
    made = config_of(name, tmp_path / "run")
    assert forked(lambda: run.run(replace(made, run=replace(made.run, seed=4)))) == 0
    assert digest_of(tmp_path / "run") != expected


def test_the_command_leaves_a_run_that_can_be_read_and_played(tmp_path, capsys):
    out = tmp_path / "run"
    given = ["--total-timesteps", "2048", "--eval-episodes", "4", "--video", "--no-progress", "--output-dir", str(out)]
    assert cli.main(["control", "ppo", "--env", "CartPole-v1", *given]) == 0
    said = capsys.readouterr().out
    assert "return/mean" in said and f"video   {out / 'episode.gif'}" in said
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/return/mean"] > 0 and rows[-1]["step"] >= 2048
    assert {"train/approx_kl", "train/explained_variance", "train/value_loss"} <= set(rows[-2])
    episodes = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert len(episodes) == 4 and all(e["kind"] == "episode" and e["length"] == e["reward"] for e in episodes)
    page = (out / "report.html").read_text()
    assert "ppo on CartPole-v1" in page and "Explained variance" in page and "data:image/gif;base64" in page
    film = Image.open(out / "episode.gif")
    assert film.n_frames > 1 and film.size[0] == 300
    agent = PPO.load(out / "model")
    mean, _ = evaluate_policy(agent, n_eval_episodes=4)
    assert 8 <= mean <= 500
    config = json.loads((out / "config.json").read_text())
    assert config["n_epochs"] == 20 and config["clip_range_schedule"] == "linear"  # tuned for this environment


def test_flags_beat_tuned_settings_and_tuned_settings_beat_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("algorithm: ppo\nn_epochs: 7\n")
    out = tmp_path / "run"
    common = ["--total-timesteps", "256", "--eval-episodes", "0", "--no-report", "--no-progress", "--output-dir", str(out)]
    assert cli.main(["control", "--config", str(tmp_path / "c.yaml"), "--gamma", "0.5", *common]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["n_epochs"], config["gamma"], config["gae_lambda"], config["n_steps"]) == (7, 0.5, 0.8, 32)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ppoo"], "did you mean 'ppo'"),
        (["ppo", "--env", "CartPol-v1"], "CartPol"),
        (["ppo", "--n-envs", "0"], "n_envs"),
        (["dqn", "--env", "Pendulum-v1"], "continuous"),
        (["q_actor_critic", "--env", "Pendulum-v1"], "continuous"),
        (["ppo", "--clip-range", "-1"], "clip_range"),
        (["a2c", "--clip-range", "0.1"], "clip"),
        (["ppo", "--max-steps", "5"], "total_timesteps"),
        (["ppo", "--learning-rat", "5"], "--learning-rate"),
        (["grpo", "--n-steps", "8"], "n_steps=0"),
    ],
)
def test_a_mistake_is_a_sentence(arguments, said, tmp_path, capsys):
    assert cli.main(["control", *arguments, "--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("psigrad: ") and said in error and "Traceback" not in error and error.count("\n") == 1


def test_the_help_of_algorithm_names_every_one():
    named, _, _ = help_of(ControlConfig, "algorithm").partition(". Or {preset")
    assert sorted(named.replace(" or ", ", ").split(", ")) == sorted(builder.names())


def test_an_agent_learns_predicts_saves_and_loads(tmp_path):
    agent = PPO("CartPole-v1", n_envs=2, n_steps=16, n_epochs=2, seed=1)
    lines = []
    assert agent.learn(200, callback=lambda a, figures: lines.append(figures["timesteps"])) is agent
    assert agent.num_timesteps >= 200 and lines[-1] == agent.num_timesteps
    assert agent.learn(100).num_timesteps >= 300  # and goes on
    observation = gym.make("CartPole-v1").reset(seed=0)[0]
    action, state = agent.predict(observation, deterministic=True)
    assert action in (0, 1) and state is None
    batch, _ = agent.predict(np.stack([observation] * 5))
    assert batch.shape == (5,)
    again = PPO.load(agent.save(tmp_path / "saved"))
    assert again.predict(observation, True)[0] == action and again.num_timesteps == agent.num_timesteps
    assert evaluate_policy(again, n_eval_episodes=8) == evaluate_policy(agent, n_eval_episodes=8)
    again.learn(64)
    with pytest.raises(UserError, match="shape"):
        agent.predict(np.zeros(3))
    with pytest.raises(UserError, match="a different network"):
        PPO.load(tmp_path / "saved", env="Acrobot-v1")
    with pytest.raises(UserError, match="holds no control policy"):
        PPO.load(tmp_path)
    with pytest.raises(UserError, match="a policy of ppo, not of dqn"):
        DQN.load(tmp_path / "saved")
    with pytest.raises(UserError, match="first part"):
        agent.predict((observation, {}))


def test_schedules_run_over_the_steps_of_each_learn(tmp_path):
    """Rollouts of 32 steps: after the first of two half of the rate is left, after the second none."""
    agent = PPO("CartPole-v1", tuned=False, n_envs=2, n_steps=16, learning_rate=1e-3, lr_scheduler_type="linear")

    def rates(agent, **more):
        found = []
        agent.learn(64, lambda a, figures: found.append(figures["train/learning_rate"]), **more)
        return pytest.approx(found, abs=1e-12)

    assert rates(agent) == [5e-4, 0.0] == rates(agent)
    assert rates(PPO.load(agent.save(tmp_path))) == [5e-4, 0.0]
    # 96 and 128 of the 128 steps since the last schedule began
    assert rates(agent, reset_num_timesteps=False) == [2.5e-4, 0.0]
    dqn = DQN("CartPole-v1", tuned=False, n_envs=1, batch_size=8, learning_starts=8, train_freq=8).learn(64)
    assert dqn._trainer.epsilon == pytest.approx(0.05)
    epsilons = []
    dqn.learn(800, lambda a, figures: epsilons.append(a._trainer.epsilon))
    assert epsilons[0] == pytest.approx(1 - 0.95 * 0.1) and epsilons[-1] == pytest.approx(0.05)


def test_a_callback_ends_training_keeps_the_best_and_saves(tmp_path):
    agent = DQN(
        "CartPole-v1", tuned=False, n_envs=1, batch_size=8, learning_starts=0, train_freq=8, net_arch=(8,), log_interval=1
    )
    stop = StopTrainingOnRewardThreshold(1.0)
    every = EvalCallback(eval_freq=64, n_eval_episodes=2, best_model_save_path=tmp_path, callback_on_new_best=stop)
    agent.learn(10_000, callback=[every, CheckpointCallback(16, tmp_path / "saved")])
    assert agent.num_timesteps < 200 and len(every.evaluations) == 1
    assert (tmp_path / "best_model" / "model.safetensors").exists() and len(list((tmp_path / "saved").glob("rl_model_*"))) >= 3


def test_an_agent_takes_any_policy_gradient_and_any_way_to_make_an_environment():
    Agent("CartPole-v1", algorithm=replace(catalog.DR_GRPO, name="mine"), n_steps=0, n_envs=4).learn(50)
    Agent("CartPole-v1", algorithm={"preset": "ppo", "surrogate": {"high": 0.28}}, n_steps=16, n_envs=2).learn(32)
    PPO(lambda: gym.make("CartPole-v1"), n_steps=16, n_envs=2).learn(32)
    PPO(gym.make("CartPole-v1"), n_steps=16, n_envs=1).learn(16)
    vectors = gym.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    assert PPO(vectors, n_steps=16).learn(32).settings.n_envs == 3
    for wrong, said in (
        (lambda: PPO("Acrobot-v1", "CartPole-v1"), "Two environments"),
        (lambda: Agent("CartPole-v1"), "algorithm"),
        (lambda: PPO("CartPole-v1", learning_rat=1), "learning_rate"),
        (lambda: PPO("CartPole-v1", learning_rate="fast"), "learning_rate"),
    ):
        with pytest.raises(UserError, match=said):
            wrong()


def test_an_environment_object_is_trained_on_evaluated_on_and_given_to_load(tmp_path):
    """The order of Stable-Baselines3's first example: one object, whatever number of copies the tuned settings have."""
    own = gym.make("CartPole-v1")
    agent = PPO("MlpPolicy", own, n_epochs=1)
    assert (agent.settings.n_envs, agent.settings.n_steps) == (1, 8 * 32)
    agent.learn(256, callback=lambda a, _: evaluate_policy(a, n_eval_episodes=2)[0] > 0, reset_num_timesteps=False)
    figures = evaluate_policy(agent, own, n_eval_episodes=3)
    assert figures == evaluate_policy(agent, agent.get_env(), n_eval_episodes=3)
    assert figures == evaluate_policy(agent, gym.make("CartPole-v1"), n_eval_episodes=3)
    made = PPO(lambda: gym.make("CartPole-v1"), n_envs=1, n_steps=16)
    made.save(tmp_path / "made")
    observation = made.observation_space.sample()
    again = PPO.load(tmp_path / "made", env=own)
    assert again.predict(observation, deterministic=True) == made.predict(observation, deterministic=True)


def test_an_evaluation_wraps_the_environment_as_training_does(tmp_path, monkeypatch):
    (tmp_path / "halved.py").write_text(
        "import gymnasium as gym\nclass Halved(gym.RewardWrapper):\n    def reward(self, reward):\n        return reward / 2\n"
    )
    monkeypatch.chdir(tmp_path)
    plain, wrapped = PPO("CartPole-v1", seed=1), PPO("CartPole-v1", seed=1, wrappers=["halved.py:Halved"])
    assert evaluate_policy(wrapped, n_eval_episodes=3)[0] == evaluate_policy(plain, n_eval_episodes=3)[0] / 2


def _learn(*arguments, **more):
    return lambda: PPO("CartPole-v1", n_envs=1).learn(*arguments, **more)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: PPO("MultiInputPolicy", "CartPole-v1"), "needs a Dict"),
        (lambda: PPO("CartPole-v1", use_sde=True), "use_sde is True.*no gSDE"),
        (lambda: PPO("CartPole-v1", learning_rate=lambda progress: progress), "lr_scheduler_type='linear'"),
        (lambda: PPO(3), "of type int"),
        (lambda: PPO(lambda: 3, n_envs=1), "of type int"),
        (lambda: evaluate_policy(PPO("CartPole-v1"), "Acrobot-v1"), "made for"),
        (lambda: evaluate_policy(PPO("CartPole-v1"), n_eval_episodes=0), "n_eval_episodes is 0"),
        (_learn(0), "total_timesteps is 0"),
        (_learn("many"), "total_timesteps is 'many'"),
        (_learn(9, callback=3), "of type int"),
        (_learn(9, log_intervall=1), "no argument 'log_intervall'"),
    ],
)
def test_what_stable_baselines_has_and_this_has_not_is_said(wrong, said):
    with pytest.raises(UserError, match=said):
        wrong()


BROKEN = """
import gymnasium as gym, numpy as np
class Line(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 9, (1,), np.float32), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(), {}
    def seen(self): return np.zeros(1, np.float32)
    def step(self, action): return self.seen(), 0.0, True, False, {}
class Raises(Line):
    def step(self, action): raise KeyError("level")
class Unmade(Line):
    def __init__(self): raise OSError("level.txt")
class Shape(Line):
    def seen(self): return np.zeros(3, np.float32)
class OldStep(Line):
    def step(self, action): return self.seen(), 0.0, True, {}
class OldReset(Line):
    def reset(self, *, seed=None, options=None): return np.zeros(1, np.float32)
class Outside(Line):
    observation_space = gym.spaces.Discrete(4)
    def seen(self): return 7
class Nan(Line):
    def step(self, action): return self.seen(), float("nan"), True, False, {}
gym.register("Line-v0", Line)
"""


@pytest.mark.parametrize(
    ("env", "more", "said"),
    [
        ("Raises", (), "step raised KeyError: 'level' (broken.py, line 11)"),
        ("Unmade", (), "raised OSError: level.txt (broken.py, line 13) when it was made"),
        ("Shape", (), "shape (3,), but its observation_space has the shape (1,)"),
        ("OldStep", (), "step (observation, reward, terminated, truncated, info)"),
        ("OldReset", (), "reset returns (observation, info)"),
        ("Outside", (), "an observation outside its observation_space Discrete(4)"),
        ("Nan", (), "reward that is NaN"),
        ("Line", ("--video",), "render_mode"),
        ("Line-v9", (), "versioned environments"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_wrong_with_an_environment_of_ones_own_is_a_sentence(env, more, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    arguments = ["ppo", "--env", f"broken{'' if env.endswith('v9') else '.py'}:{env}", "--total-timesteps", "64", "--n-envs", "1"]
    assert cli.main(["control", *arguments, "--eval-episodes", "0", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("psigrad: ") and said in error and "Traceback" not in error
    assert not (more and (tmp_path / "runs").exists()), "a picture that cannot be drawn is noticed before anything is trained"


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_ppo_solves_cartpole(seed):
    """475 over 100 episodes, the threshold that Gymnasium registers."""
    stop = StopTrainingOnRewardThreshold(490.0)  # learning on would prove nothing more
    solved = EvalCallback(eval_freq=1_024, n_eval_episodes=16, callback_on_new_best=stop)
    agent = PPO("CartPole-v1", seed=seed).learn(60_000, callback=solved)
    assert evaluate_policy(agent, n_eval_episodes=100, seed=seed)[0] >= 475


def test_the_commands_tuned_settings_reach_their_sections(monkeypatch, capsys):
    from psigrad.control import commands

    seen = commanded(monkeypatch)
    commands.control(["dqn", "--env", "CartPole-v1"])
    commands.control(["dqn", "--env", "CartPole-v1", "--net-arch", "32", "--no-double-q"])
    commands.control(["dqn", "--env", "CartPole-v1", "--no-tuned"])
    tuned, given, plain = seen
    assert tuned.network.net_arch == (256, 256) and tuned.dqn.double_q and tuned.dqn.train_freq == 256
    assert given.network.net_arch == (32,) and not given.dqn.double_q and given.dqn.train_freq == 256
    assert plain.network.net_arch == (64, 64) and plain.dqn.train_freq == 4
