"""What users of Stable-Baselines3 write: its callbacks, names, attributes and flags, understood or answered with ours."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from control_worlds import Chain, Locks, commanded

import psigrad.control
from psigrad import cli
from psigrad.compat.foreign_names import load
from psigrad.control import (
    A2C,
    DQN,
    PPO,
    Agent,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
    builder,
    evaluate_policy,
)
from psigrad.control.methods import presets
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.objective import catalog
from psigrad.objective.parts.advantage import needs
from psigrad.objective.parts.surrogate import clip

SMALL = {"tuned": False, "n_envs": 2, "n_steps": 16, "n_epochs": 2}
ONCE = {**SMALL, "n_epochs": 1}


@pytest.mark.parametrize("world", [Chain, Locks], ids=["Discrete", "Dict"])
def test_a_policy_without_an_id_loads_and_predicts_without_an_environment(world, tmp_path):
    agent = PPO(world, normalize_observations=world is Locks, **SMALL).learn(64)
    agent.observation_space.seed(0)
    seen = [agent.observation_space.sample() for _ in range(8)]
    expected = [agent.predict(one, deterministic=True)[0] for one in seen]
    agent.save(tmp_path / "once")
    again = PPO.load(tmp_path / "once", device="cpu")
    PPO.load(again.save(tmp_path / "twice"))
    for loaded in (again, PPO.load(tmp_path / "twice.zip")):
        assert (loaded.observation_space, loaded.action_space) == (agent.observation_space, agent.action_space)
        np.testing.assert_array_equal([loaded.predict(one, deterministic=True)[0] for one in seen], expected)
        assert loaded.get_env() is None and loaded.settings.n_envs == 2
    for asks in (lambda: again.learn(64), lambda: evaluate_policy(again)):
        with pytest.raises(UserError, match=r"without an environment: .*no id.*set_env"):
            asks()
    assert evaluate_policy(again, world, 8)[0] == evaluate_policy(agent, n_eval_episodes=8)[0]
    with pytest.raises(UserError, match="made for"):
        again.set_env("CartPole-v1")
    again.set_env(world)
    assert again.learn(64).num_timesteps == 128 and again.get_env().num_envs == 2


def test_a_policy_whose_environment_cannot_be_made_here_says_so_where_one_is_needed(tmp_path):
    gym.register("Elsewhere-v0", Chain)
    PPO("Elsewhere-v0", **SMALL).save(tmp_path / "saved")
    gym.registry.pop("Elsewhere-v0")
    loaded = PPO.load(tmp_path / "saved")
    assert loaded.predict(0, deterministic=True)[0] in (0, 1)
    with pytest.raises(UserError, match=r"Elsewhere.*set_env"):
        loaded.learn(64)


def test_a_policy_of_before_spaces_were_saved_asks_for_its_environment(tmp_path):
    PPO(Chain, **SMALL).save(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["spaces"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="env=…"):
        PPO.load(tmp_path)
    assert PPO.load(tmp_path, env=Chain).get_env() is not None


METHODS = {
    "another name": (replace(presets.PPO, name="mine"), None),
    "another clip": (replace(presets.PPO, surrogate=clip(0.05, 0.1)), None),
    "a preset": (presets.A2C, "a2c"),
    "of a language model": (replace(catalog.DR_GRPO, name="mine", keep=(catalog.has_signal,)), None),
    "parts": ({"preset": "ppo", "surrogate": {"high": 0.28}}, {"preset": "ppo", "surrogate": {"high": 0.28}}),
    "parts as objects": ({"preset": "ppo", "surrogate": clip(0.1)}, None),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_policy_is_loaded_with_the_method_that_trained_it(name, tmp_path):
    method, written = METHODS[name]
    whole = {"n_steps": 0} if name == "of a language model" else {}
    agent = Agent(Chain, algorithm=method, **{**ONCE, **whole})
    again = Agent.load(agent.save(tmp_path), env=Chain)
    assert again._trainer.algorithm == agent._trainer.algorithm
    assert written is None or json.loads((tmp_path / "config.json").read_text())["algorithm"] == written
    assert again.learn(32).num_timesteps >= 32


class Whole:
    """A psi that nobody finds by a name: its class alone makes another one."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, batch):
        return self.scale * catalog.DR_GRPO.psi(batch)


@dataclass(frozen=True)
class Scaled:
    """A psi whose number no JSON holds."""

    scale: torch.Tensor

    def __call__(self, batch):
        return self.scale * batch.reward


OWN = {"lambda": lambda batch: batch.reward, "object": Whole(3.0), "tensor": Scaled(torch.tensor([2.0]))}


@pytest.mark.parametrize("psi", OWN.values(), ids=OWN)
def test_a_policy_of_a_method_that_cannot_be_saved_acts_and_takes_the_method_from_load(psi, tmp_path):
    method = replace(presets.REINFORCE_TOTAL_RETURN, psi=psi, name="mine")
    agent = Agent(Chain, algorithm=method, **{**ONCE, "n_steps": 0}).learn(16)
    once = Agent.load(agent.save(tmp_path / "once"), env=Chain)
    twice = Agent.load(once.save(tmp_path / "twice"), env=Chain)
    for loaded in (once, twice):
        seen = [loaded.predict(state, deterministic=True)[0] for state in range(4)]
        assert seen == [agent.predict(state, deterministic=True)[0] for state in range(4)]
        assert evaluate_policy(loaded, n_eval_episodes=3) == evaluate_policy(agent, n_eval_episodes=3)
        with pytest.raises(
            UserError,
            match=r"can act but not train, since its folder does not contain its method.*Load it again with algorithm=",
        ):
            loaded.learn(16)
    with pytest.raises(UserError, match="a policy of mine, not of ppo"):
        PPO.load(tmp_path / "once", env=Chain)
    trained = Agent.load(tmp_path / "twice", env=Chain, algorithm=method)
    assert trained._trainer.algorithm == method and trained.learn(16).num_timesteps > agent.num_timesteps
    with pytest.raises(UserError, match="a different network"):
        Agent.load(tmp_path / "once", env=Chain, algorithm="a2c", tensorboard_log=None)


def test_policies_with_critics_act_too_where_their_method_is_unknown(tmp_path):
    for base in (presets.A2C, presets.Q_ACTOR_CRITIC):
        psi = needs(base.psi.needs)(lambda batch, psi=base.psi: psi(batch))
        agent = Agent(Chain, algorithm=replace(base, psi=psi, name="mine"), **ONCE)
        loaded = Agent.load(agent.save(tmp_path / base.name), env=Chain)
        assert loaded.predict(0, deterministic=True) == agent.predict(0, deterministic=True)


def test_a_file_of_stable_baselines3_is_told_apart(tmp_path):
    (tmp_path / "theirs.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match="a folder"):
        PPO.load(tmp_path / "theirs.zip")
    with pytest.raises(UserError, match="load has no argument 'learning_rat'"):
        PPO.load(tmp_path, learning_rat=1)


def test_callbacks_have_stable_baselines3s_arguments_and_count_steps_of_each_copy(tmp_path, capsys):
    agent = DQN(
        "CartPole-v1", tuned=False, n_envs=2, batch_size=8, learning_starts=0, train_freq=8, net_arch=(8,), log_interval=1
    )
    stop = StopTrainingOnRewardThreshold(1.0, verbose=1)
    every = EvalCallback(
        gym.make("CartPole-v1"),
        eval_freq=32,
        n_eval_episodes=2,
        best_model_save_path=str(tmp_path / "logs"),
        callback_on_new_best=stop,
        verbose=1,
        render=False,
        warn=True,
    )
    agent.learn(10_000, callback=[every, CheckpointCallback(8, tmp_path / "saved", name_prefix="dqn")])
    assert agent.num_timesteps == 64 and [steps for steps, _ in every.evaluations] == [64]
    assert DQN.load(tmp_path / "logs" / "best_model").num_timesteps == 64
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [f"dqn_{n}_steps" for n in (16, 32, 48, 64)]
    said = capsys.readouterr().out
    assert "64 steps: return" in said and "training ends, because" in said


def test_a_callback_counts_from_where_it_was_first_given(tmp_path):
    agent = PPO("CartPole-v1", **SMALL).learn(64)
    for one in (agent, PPO.load(agent.save(tmp_path / "saved"))):
        every = EvalCallback(eval_freq=32, n_eval_episodes=1)
        one.learn(128, callback=every)
        assert [steps for steps, _ in every.evaluations] == [64 + 64, 64 + 128], "eval_freq · n_envs = 64"


def test_only_a_better_evaluation_is_kept_and_any_may_end_training(tmp_path):
    agent = PPO("CartPole-v1", **SMALL)
    means, best = iter([5.0, 3.0, 9.0, 9.0]), []
    every = EvalCallback(
        eval_freq=16,
        callback_on_new_best=lambda a, _: best.append(a.num_timesteps),
        callback_after_eval=lambda a, f: len(best) < 3,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psigrad.control.agent_callbacks.evaluate_policy", lambda *given, **more: ([next(means)], [1]))
        agent.learn(128, callback=every)
    assert best == [32, 96] and [mean for _, mean in every.evaluations] == [5.0, 3.0, 9.0, 9.0]
    agent.learn(320, callback=[lambda a, figures: a.num_timesteps < 160])
    assert agent.num_timesteps == 160


def test_the_episodes_of_an_evaluation_are_given_where_they_are_asked_for():
    agent = PPO("CartPole-v1", **SMALL)
    returns, lengths = evaluate_policy(agent, n_eval_episodes=4, return_episode_rewards=True)
    assert returns == lengths and len(returns) == 4 and np.mean(returns) == evaluate_policy(agent, n_eval_episodes=4)[0]


def test_their_first_examples_of_dqn_and_of_evaluations_run_as_they_stand(tmp_path, capsys):
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    model = DQN("MlpPolicy", env, verbose=1, train_freq=(4, "step"), batch_size=32, learning_starts=100, tuned=False)
    every = EvalCallback(env, log_path=str(tmp_path), eval_freq=400, n_eval_episodes=3, deterministic=True, render=False)
    model.learn(total_timesteps=1200, log_interval=4, callback=every, reset_num_timesteps=True, tb_log_name="first")
    with np.load(tmp_path / "evaluations.npz") as found:
        assert found["timesteps"].tolist() == [steps for steps, _ in every.evaluations] and len(found["timesteps"]) > 1
        assert found["results"].shape == found["ep_lengths"].shape == (len(every.evaluations), 3)
        np.testing.assert_allclose(found["results"].mean(1), [mean for _, mean in every.evaluations])
    printed = capsys.readouterr().out.count("ep_rew_mean")
    model.learn(total_timesteps=1200, log_interval=10_000, reset_num_timesteps=False)
    assert printed > 0 and "ep_rew_mean" not in capsys.readouterr().out
    assert evaluate_policy(model, env, 2, True, render=False, callback=None, warn=False)[0] > 0
    assert model.get_env().render()[0].ndim == 3
    before = model.num_timesteps
    assert model.learn(100, reset_num_timesteps=True).num_timesteps == before + 100  # their default is as good as left out
    with pytest.raises(UserError, match="always continues"):
        model.learn(100, reset_num_timesteps="yes")


def test_figures_go_to_tensorboards_folders_as_stable_baselines3_numbers_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(name):
        log = EventAccumulator(str(tmp_path / name / "tensorboard"))
        log.Reload()
        return {tag: [event.step for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}

    agent = PPO("MlpPolicy", "CartPole-v1", tensorboard_log=str(tmp_path), **SMALL)
    agent.learn(96, callback=EvalCallback(eval_freq=16, n_eval_episodes=2))
    assert read("PPO_1")["train/value_loss"] == [32, 64, 96] == read("PPO_1")["eval/return/mean"]
    agent.learn(32, reset_num_timesteps=False, tb_log_name="PPO")
    assert read("PPO_1")["train/value_loss"] == [32, 64, 96, 128]
    again = PPO.load(agent.save(tmp_path / "saved"), tensorboard_log=tmp_path)
    again.learn(32)
    again.learn(32, tb_log_name="second")
    assert read("PPO_2")["train/value_loss"] == [160] and read("second_1")["train/value_loss"] == [192]
    PPO("MlpPolicy", "CartPole-v1", **SMALL).learn(32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["PPO_1", "PPO_2", "saved", "second_1"]


ZOO = """
CartPole-v1:
  n_envs: 8
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  batch_size: 256
  learning_rate: lin_0.002
  clip_range: lin_0.3
Acrobot-v1:
  normalize: true
  n_timesteps: !!float 1e6
  policy: 'MlpPolicy'
  ent_coef: 0.0
"""


def test_a_settings_file_of_rl_zoo3_is_read(tmp_path):
    from psigrad.compat.foreign_names import load
    from psigrad.control.settings import ControlConfig

    (tmp_path / "ppo.yml").write_text(ZOO)
    found = load(ControlConfig, tmp_path / "ppo.yml", flags={"env": "CartPole-v1"})
    assert (found.total_timesteps, found.batch_size, found.learning_rate, found.clip_range) == (100_000, 256, 0.002, 0.3)
    assert found.lr_scheduler_type == found.clip_range_schedule == "linear" and not found.normalize_rewards
    other = load(ControlConfig, tmp_path / "ppo.yml", flags={"env": "Acrobot-v1", "n_timesteps": 99})
    assert other.normalize_observations and other.normalize_rewards and other.total_timesteps == 99
    (tmp_path / "one.yml").write_text(ZOO.partition("Acrobot")[0])
    assert load(ControlConfig, tmp_path / "one.yml") == found
    for env, said in (("CartPole-v0", "environment 'CartPole-v0'.*mean 'CartPole-v1'"), (None, "give --env one of CartPole-v1")):
        with pytest.raises(UserError, match=said):
            load(ControlConfig, tmp_path / "ppo.yml", flags={"env": env} if env else {})
    (tmp_path / "kwargs.yml").write_text(ZOO.partition("Acrobot")[0] + '  policy_kwargs: "dict(net_arch=[64])"\n')
    with pytest.raises(UserError, match="net_arch: \\[64, 64\\]"):
        load(ControlConfig, tmp_path / "kwargs.yml")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("true", (True, True)),
        ("false", (False, False)),
        ("\"{'norm_obs': True, 'norm_reward': False}\"", (True, False)),
        ("\"{'norm_obs': False}\"", (False, True)),
        ("{norm_obs: true, norm_reward: false}", (True, False)),
        ('"dict(norm_obs=True)"', None),
        ("{clip_obs: 5}", None),
    ],
)
def test_normalize_of_rl_zoo3_is_read_or_refused(written, found, tmp_path):
    from psigrad.compat.foreign_names import load
    from psigrad.control.settings import ControlConfig

    (tmp_path / "ppo.yml").write_text(f"CartPole-v1:\n  policy: MlpPolicy\n  normalize: {written}\n")
    if found is None:
        with pytest.raises(UserError, match=r"ppo.yml: normalize is .*; expected true, false, or norm_obs"):
            load(ControlConfig, tmp_path / "ppo.yml")
    else:
        made = load(ControlConfig, tmp_path / "ppo.yml")
        assert (made.normalize_observations, made.normalize_rewards) == found


def test_a_replay_buffer_is_saved_and_loaded_as_in_stable_baselines3(tmp_path):
    settings = {"tuned": False, "learning_starts": 16, "train_freq": 4, "buffer_size": 100, "batch_size": 8}
    agent = DQN(Chain, **settings)
    agent.learn(64, CheckpointCallback(8, tmp_path / "logs", save_replay_buffer=True))
    assert (tmp_path / "logs" / "rl_model_replay_buffer_64_steps.safetensors").is_file()
    saved = agent.save_replay_buffer(tmp_path / "new" / "buffer.pkl")
    assert saved == tmp_path / "new" / "buffer.safetensors"
    other = DQN(Chain, **settings)
    other.load_replay_buffer(tmp_path / "new" / "buffer")
    ours, theirs = (a._trainer.replay.tensors() for a in (agent, other))
    assert len(ours["action"]) == 64 and all((ours[name] == theirs[name]).all() for name in ours)
    with pytest.raises(UserError, match="There is no file"):
        other.load_replay_buffer(tmp_path / "nowhere")
    with pytest.raises(
        UserError, match=r"is not a replay buffer of this agent: the saved transitions have observation of shape \[4\]"
    ):
        DQN("MountainCar-v0", **settings).load_replay_buffer(saved)
    with pytest.raises(AttributeError, match="only DQN has a replay buffer"):
        PPO(Chain, **SMALL).save_replay_buffer(tmp_path / "x")


def theirs(kind, *given, **more):
    from stable_baselines3.common import callbacks

    return getattr(callbacks, kind)(*given, **more)


def own_callback():
    from stable_baselines3.common.callbacks import BaseCallback

    class Mine(BaseCallback):
        def _on_step(self):
            return True

    return Mine()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (own_callback, "callback Mine has Stable-Baselines3's _on_step.*a function of the agent and its figures"),
        (lambda: theirs("CheckpointCallback", 9, "logs"), "import the CheckpointCallback of psigrad.control"),
        (lambda: theirs("ProgressBarCallback"), "progress_bar=True"),
        (lambda: theirs("CallbackList", []), "a list of callbacks"),
        (lambda: EvalCallback, "of type type"),
    ],
)
def test_callbacks_of_stable_baselines3_are_answered_with_ours(make, said):
    with pytest.raises(UserError, match=said):
        PPO("CartPole-v1", **SMALL).learn(9, callback=make())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: EvalCallback(every=9), "EvalCallback has no argument 'every'; expected eval_env, eval_freq"),
        (lambda: EvalCallback(eval_freq=0), "eval_freq is 0"),
        (lambda: PPO("CartPole-v1", policy_kwargs={"net_arch": [-1]}), r"net_arch is \[-1\]; expected widths"),
        (lambda: DQN("CartPole-v1", train_freq=(1, "episode")), "number of steps, such as 4"),
        (lambda: DQN("CartPole-v1", replay_buffer_class=object), "no HER"),
        (lambda: evaluate_policy(object()), "in place of an agent"),
        (lambda: evaluate_policy(PPO("CartPole-v1"), n_eval_episodes=2.5), "n_eval_episodes is 2.5"),
        (lambda: evaluate_policy(PPO("CartPole-v1"), reward_threshold=9), "compare the returned mean"),
        (lambda: evaluate_policy(PPO("CartPole-v1"), rendr=True), "evaluate_policy has no argument 'rendr'"),
        (lambda: PPO("CartPole-v1", **SMALL).learn(float("nan")), "total_timesteps is nan"),
        (lambda: PPO("CartPole-v1", **SMALL).learn(64, log_interval=0), "log_interval is 0"),
        (lambda: EvalCallback(callback_after_eval=3), "of type int"),
        (lambda: PPO("CartPole-v1", **SMALL).learn(64, callback=StopTrainingOnRewardThreshold(3)), "callback_on_new_best"),
        (lambda: Agent("Pendulum-v1", algorithm="sac"), "no algorithm 'sac'.*PPO, A2C and TRPO"),
        (lambda: PPO(env="CartPole-v1", algorithm="recurrent_ppo"), "FrameStackObservation"),
        (lambda: PPO("Pendulum-v1", use_sde=True), "no gSDE; log_std_init sets the initial noise"),
    ],
)
def test_a_mistake_names_what_there_is(wrong, said):
    with pytest.raises(UserError, match=said):
        wrong()


def test_names_that_are_elsewhere_say_what_to_use():
    from stable_baselines3.common import callbacks, env_util, vec_env

    with pytest.raises(ImportError, match="no off-policy method for continuous actions; PPO, A2C and TRPO"):
        from psigrad.control import SAC  # noqa: F401
    with pytest.raises(ImportError, match="a function of the agent"):
        from psigrad.control import BaseCallback  # noqa: F401
    assert not hasattr(psigrad.control, "nothing")
    # every callback of Stable-Baselines3's own is here or answered, and so are the makers of environments
    kinds = [n for n in vars(callbacks) if n.endswith("Callback") or n.startswith(("StopTraining", "Callback", "Every"))]
    for known in [*kinds, "make_vec_env", "DummyVecEnv", "SubprocVecEnv", "VecNormalize", "VecFrameStack", "VecMonitor"]:
        assert any(hasattr(module, known) for module in (callbacks, env_util, vec_env)), known
        assert known in psigrad.control.__all__ or known in psigrad.control.ELSEWHERE or known in ("ConvertCallback",), known


def test_attributes_of_an_agent_that_are_elsewhere_say_where():
    agent = A2C("CartPole-v1")
    for attribute, said in {"policy": "predict acts", "gamma": "agent.settings.gamma", "logger": "callback"}.items():
        with pytest.raises(AttributeError, match=f"A2C has no attribute '{attribute}'.*{said}"):
            getattr(agent, attribute)
    assert not hasattr(agent, "nothing")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "MlpPolic"), "--policy is .*; psigrad takes only .MlpPolicy., .*: net_arch, activation"),
        (("--env-kwargs", "{gravit: 3}"), "env_kwargs has 'gravit'.*takes sutton_barto_reward, render_mode"),
        (("--env-kwargs", "{gravity:3}"), "write them as {name: value}"),
        (("--env-kwargs", "gravity:3"), "env_kwargs"),
        (("--use-sde",), "no gSDE"),
        (("--algo", "sac"), "no algorithm 'sac'"),
        (("--eval-freq", "9"), "eval_steps"),
        (("--vec-env", "subproc"), "vectorization"),
    ],
)
def test_flags_of_rl_zoo3_are_answered(arguments, said, tmp_path, capsys):
    import re

    assert cli.main(["control", *arguments, "--env", "CartPole-v1", "--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and "Traceback" not in error and "did you mean '--allow'" not in error


def test_flags_of_rl_zoo3_that_mean_the_same_are_taken(tmp_path, monkeypatch):
    seen = commanded(monkeypatch)
    theirs = ["--algo", "dqn", "--env", "CartPole-v1", "--n-timesteps", "99", "--policy", "CnnPolicy", "--n-eval-episodes", "7"]
    assert cli.main(["control", *theirs, "--env-kwargs", "{sutton_barto_reward: true}"]) == 0
    (found,) = seen
    assert (found.algorithm, found.total_timesteps, found.eval_episodes) == ("dqn", 99, 7)
    assert found.dqn.double_q and found.network.net_arch == (512,) and found.env_kwargs == {"sutton_barto_reward": True}


def test_a_cnn_policy_serves_methods_without_a_critic_too(tmp_path):
    """Its critic shares layers with the policy; DQN and TRPO do not read that setting, and name it if it is given alone."""
    config = load(ControlConfig, flags={"algorithm": "dqn", "policy": "CnnPolicy", "env": "CartPole-v1", "batch_size": 64})
    assert builder.build(config).config.network.net_arch == (512,)
    alone = replace(ControlConfig(), algorithm="dqn", network=replace(ControlConfig().network, critic="shared"))
    with pytest.raises(UserError, match=r"network\.critic is shared, but dqn does not read it"):
        builder.build(alone)


def test_a_recurrent_policy_is_refused_with_what_does_its_work():
    with pytest.raises(UserError, match=r"'MlpLstmPolicy'.*psigrad has no recurrent policies, so stack observations"):
        DQN("MlpLstmPolicy", "CartPole-v1")
