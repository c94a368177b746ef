"""Conversion of Stable-Baselines3's arguments to settings, errors for those without an equivalent, and its table of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gymnasium.spaces import Dict

from psigrad.control.environments.vector import Environments
from psigrad.control.methods.trainer import Trainer
from psigrad.errors import UserError, nearest
from psigrad.paths import absolute
from psigrad.records.rows import parse_row

MLP, CNN, MULTI = "MlpPolicy", "CnnPolicy", "MultiInputPolicy"
# Policy name -> its settings, which given settings override. CnnPolicy: Mnih et al. 2015, with layers shared with the critic.
SETTINGS: dict[str, dict[str, Any]] = {
    MLP: {},
    CNN: {"network.net_arch": (512,), "network.activation": "relu", "network.critic": "shared"},
    MULTI: {},
}
_ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu"}


def policy_name(policy: Any, env: Any) -> str | None:
    """Return the policy's name in `PPO("MlpPolicy", env)`, or None for `PPO(env)`. Raises `UserError` for an unknown policy."""
    if not (isinstance(policy, str) and policy.endswith("Policy")):
        if env is not None:
            raise UserError(
                f"Two environments were given, {policy!r} and {env!r}; expected one, alone or after a policy's name ({MLP})."
            )
        return None
    if policy not in SETTINGS:
        near = (
            "; psigrad has no recurrent policies, so stack observations (FrameStackObservation)."
            if "Lstm" in policy
            else nearest(policy, SETTINGS)
        )
        raise UserError(f"There is no policy {policy!r}; expected {' or '.join(SETTINGS)}{near or '.'}")
    if env is None:
        raise UserError(f'The policy {policy!r} needs an environment; write for example PPO("{policy}", "CartPole-v1").')
    return policy


def check(policy: str | None, envs: Environments) -> None:
    """Raise `UserError` for a `CnnPolicy` without images, and for a `MultiInputPolicy` without a Dict of observations."""
    if policy == CNN and envs.image is None:
        raise UserError(f"{CNN} needs images, but this environment has {envs.spaces[0]}; use {MLP}.")
    if policy == MULTI and not isinstance(envs.spaces[0], Dict):
        raise UserError(f"{MULTI} needs a Dict of observations, but this environment has {envs.spaces[0]}; use {MLP}.")


def translate_kwargs(policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Stable-Baselines3's `policy_kwargs` into settings. Raises `UserError` for one without an equivalent."""
    found: dict[str, Any] = {}
    for name, value in policy_kwargs.items():
        if name == "net_arch" and isinstance(value, list | tuple) and all(isinstance(n, int) for n in value):
            found["network.net_arch"] = tuple(value)
        elif name == "net_arch" and isinstance(value, Mapping) and value.get("pi") == value.get("vf"):
            found["network.net_arch"] = tuple(value["pi"])
        elif name == "activation_fn" and getattr(value, "__name__", "") in _ACTIVATIONS:
            found["network.activation"] = _ACTIVATIONS[value.__name__]
        elif name == "log_std_init":
            found["network.log_std_init"] = float(value)
        else:
            raise UserError(
                f"policy_kwargs has {name}={value!r}; expected net_arch (widths, the same for policy and critic), activation_fn "
                "(torch.nn.Tanh or ReLU) or log_std_init."
            )
    return found


# Stable-Baselines3's arguments without an equivalent -> (the values without effect, which are accepted; the advice for others).
_WITHOUT_EQUAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_sde": ((False,), "psigrad has no gSDE; log_std_init sets the initial noise, which is learned"),
    "sde_sample_freq": ((-1,), "psigrad has no gSDE"),
    "use_rms_prop": ((True,), "set optimizer to 'adam' or 'rmsprop'"),
    "clip_range_vf": ((None,), "the critic's loss is not clipped"),
    "stats_window_size": ((100,), "figures are over the last 100 episodes"),
    "optimize_memory_usage": ((False,), "images are already stored as bytes"),
    "reward_threshold": ((None,), "compare the returned mean with the threshold"),
    "replay_buffer_class": ((None,), "DQN's buffer draws uniformly, and psigrad has no HER"),
    "replay_buffer_kwargs": ((None, {}), "DQN's buffer draws uniformly"),
    "rollout_buffer_class": ((None,), "psigrad has a single kind of rollout buffer"),
    "rollout_buffer_kwargs": ((None, {}), "psigrad has a single kind of rollout buffer"),
    "monitor_wrapper": ((True, False), "returns and lengths of episodes are always counted"),
    "_init_setup_model": ((True,), "an agent is always ready to learn"),
    "reset_num_timesteps": ((True, False), "the step count always continues; for a fresh start create a new agent"),
    "callback": ((None,), "return_episode_rewards=True gives every episode"),
    "render": ((False,), "psigrad control --video draws an episode"),
    "save_vecnormalize": ((True, False), "a saved policy includes the normalisation"),
    "warn": ((True, False), ""),
    "custom_objects": ((None,), "nothing in a saved policy is code"),
    "print_system_info": ((False,), "psigrad doctor prints what the machine offers"),
    "force_reset": ((True,), "episodes always restart"),
}


def drop_foreign(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those arguments of Stable-Baselines3 that have no equivalent and whose values have no effect.

    `device` is dropped if it is the CPU, on which control always runs. Raises `UserError` for a value that would have an effect,
    and for a schedule that is a function.
    """
    rest = dict(settings)
    if "rms_prop_eps" in rest:
        rest["adam_epsilon"] = rest.pop("rms_prop_eps")
    if isinstance(frequency := rest.get("train_freq"), tuple | list) and len(frequency) == 2:
        if frequency[1] != "step":
            raise UserError(f"train_freq is {frequency!r}; expected a number of steps, such as 4 or (4, 'step').")
        rest["train_freq"] = frequency[0]
    for name, (idle, advice) in _WITHOUT_EQUAL.items():
        if name in rest and (value := rest.pop(name)) not in idle:
            raise UserError(f"{name} is {value!r}, which has no equivalent in psigrad: {advice}; remove it.")
    for name, schedule in (("learning_rate", "lr_scheduler_type"), ("clip_range", "clip_range_schedule")):
        if callable(rest.get(name)):
            raise UserError(f"{name} is a function; expected its initial value, with {schedule}='linear' for a decay to 0.")
    asked = str(rest.pop("device", "auto"))
    if asked not in ("auto", "cpu"):
        raise UserError(f"device is {asked!r}, but control runs on the CPU, which is faster for small networks; remove device.")
    return rest


def refuse(foreign: Mapping[str, Any], of: str, expected: Sequence[str]) -> None:
    """Raise `UserError` for arguments that the function `of` does not have, unless their values have no effect."""
    if unknown := drop_foreign(foreign):
        name = next(iter(unknown))
        settings = ". Settings are given when the agent is made." if of == "learn" else "."
        raise UserError(f"{of} has no argument {name!r}; expected {', '.join(expected)}{nearest(name, expected) or settings}")


_CALLBACK = (
    "a callback is a function of the agent and its figures, called after each line of figures, every log_interval-th rollout; "
    "returning False ends training"
)
_COPIES = "n_envs=8 makes copies, and vectorization='async' gives each a process"
_CONTINUOUS = "there is no off-policy method for continuous actions; PPO, A2C and TRPO take them"
# Algorithms of Stable-Baselines3, its contrib package and rl-zoo3 that psigrad lacks -> a sentence on what to use instead.
ELSEWHERE = {
    **dict.fromkeys(("SAC", "TD3", "DDPG", "TQC", "CrossQ"), _CONTINUOUS),
    "QRDQN": "the closest is DQN(…, double_q=True)",
    "RecurrentPPO": "policies have no memory; show PPO several observations, by gymnasium.wrappers.FrameStackObservation",
    "MaskablePPO": "actions are not masked; let the environment ignore those that are not allowed, and use PPO",
    "ARS": "every method of psigrad follows a gradient; use PPO or REINFORCE",
    "HER": _CONTINUOUS,
    "HerReplayBuffer": _CONTINUOUS,
    "BaseCallback": _CALLBACK,
    "CallbackList": "learn takes a list of callbacks",
    "EveryNTimesteps": _CALLBACK,
    "EventCallback": _CALLBACK,
    "StopTrainingOnMaxEpisodes": "write callback=lambda agent, figures: figures.get('rollout/episodes', 0) < 1000",
    "StopTrainingOnNoModelImprovement": "give EvalCallback a callback_after_eval, a function of the agent and its figures",
    "ProgressBarCallback": "learn(…, progress_bar=True) shows a progress bar",
    "VecNormalize": "set normalize_observations=True and normalize_rewards=True",
    "VecFrameStack": "gymnasium.wrappers.FrameStackObservation does the same",
    **dict.fromkeys(("make_vec_env", "DummyVecEnv", "SubprocVecEnv"), _COPIES),
    **dict.fromkeys(("Monitor", "VecMonitor"), "returns and lengths of episodes are always counted"),
    **dict.fromkeys(
        ("make_atari_env", "AtariWrapper"), "gymnasium.wrappers.AtariPreprocessing and FrameStackObservation do the same"
    ),
}


def elsewhere(algorithm: str) -> str | None:
    """Return a sentence on what to use instead of an algorithm of Stable-Baselines3 that psigrad lacks; None for other names."""
    names = {name.lower(): advice for name, advice in ELSEWHERE.items()}
    return names.get(algorithm.lower().replace("_", ""))


def check_callback(call: Any) -> None:
    """Raise `UserError` for a callback that cannot be called, including those of Stable-Baselines3."""
    kind = type(call).__name__
    if hasattr(call, "_on_step"):
        own = f"import the {kind} of psigrad.control" if kind in _OWN_CALLBACKS else ELSEWHERE.get(kind, _CALLBACK)
        raise UserError(
            f"The callback {kind} has Stable-Baselines3's _on_step, which psigrad never calls, since it takes many steps at "
            f"a time. Use this instead: {own}."
        )
    if isinstance(call, type) or not callable(call):
        raise UserError(f"The callback is of type {kind}; expected a function of the agent and its figures.")


_OWN_CALLBACKS = ("EvalCallback", "CheckpointCallback", "StopTrainingOnRewardThreshold")
# Attributes of an agent of Stable-Baselines3 -> the equivalent in psigrad.
_ATTRIBUTES = {
    "policy": "predict acts, and save writes the weights as model.safetensors",
    "env": "get_env() gives the environments",
    "logger": "a callback of learn is given every figure; psigrad control --report-to writes them to a tracker",
    "set_logger": "a callback of learn is given every figure; psigrad control --report-to writes them to a tracker",
    "device": "control always runs on the CPU",
    "get_vec_normalize_env": "the normalisation is part of the agent, and saved with it",
    "get_parameters": "save writes the weights as model.safetensors",
    "set_parameters": "load reads what save wrote",
    "set_random_seed": "the seed is a setting: seed=0",
    **dict.fromkeys(("save_replay_buffer", "load_replay_buffer"), "only DQN has a replay buffer"),
    **dict.fromkeys(("replay_buffer", "rollout_buffer"), "psigrad control saves complete checkpoints and resumes from them"),
    "ep_info_buffer": "a callback gets the figures of episodes as rollout/ep_rew_mean and rollout/ep_len_mean",
}


def no_attribute(of: str, name: str, settings: Mapping[str, Any]) -> str:
    """Return the error message for an attribute that an agent does not have."""
    advice = f"it is a setting: agent.settings.{name}" if name in settings else _ATTRIBUTES.get(name, "")
    return f"{of} has no attribute {name!r}{': ' if advice else '.'}{advice}"


def tensors_file(path: str | Path) -> Path:
    """Return the path with the suffix .safetensors, in place of Stable-Baselines3's .pkl or of no suffix."""
    file = absolute(path)
    return file.with_suffix(".safetensors") if file.suffix in ("", ".pkl") else file


def check_place(folder: Path) -> None:
    """Raise `UserError` if saving a policy in the folder would replace files of something else, such as a language model."""
    config = folder / "config.json"
    held = parse_row(config.read_bytes()) if config.is_file() else None
    if "normalizer" not in (held or {}) and (config.exists() or (folder / "model.safetensors").exists()):
        raise UserError(f"{folder} holds a model that is not a policy of psigrad. Choose another path.")


def strip_zip(path: Path) -> Path:
    """Return the path of a policy's folder, without a suffix .zip, which users of Stable-Baselines3 may add.

    Raises `UserError` if there is a .zip file of Stable-Baselines3.
    """
    if path.is_file():
        raise UserError(f"{path} is a file, and a policy of psigrad is a folder; psigrad cannot read files of Stable-Baselines3.")
    return path.with_suffix("") if path.suffix == ".zip" and not path.exists() else path


class PrintedLines:
    """A counter that selects the lines of metrics to print: every `interval`-th, or all if it is None.

    For DQN, a line is printed after every `interval` episodes.
    """

    def __init__(self, interval: int | None, trainer: Trainer) -> None:
        if interval is not None and (not isinstance(interval, int) or interval < 1):
            raise UserError(f"log_interval is {interval!r}; expected a whole number of 1 or more.")
        self._interval, self._trainer = interval, trainer
        self._last = self._now()

    def _now(self) -> int:
        in_episodes = self._trainer.prints_by_episode
        return self._trainer.collector.statistics.episodes if in_episodes else self._trainer.lines

    def due(self) -> bool:
        """Return True if the newest line is to be printed."""
        if self._now() - self._last < (self._interval or 0):
            return False
        self._last = self._now()
        return True


def table(figures: Mapping[str, float]) -> str:
    """Return metrics as a text of aligned lines, grouped by the part of their names before the slash."""
    groups: dict[str, dict[str, float]] = {}
    for name, value in figures.items():
        group, _, leaf = name.rpartition("/")
        groups.setdefault(group, {})[leaf] = value
    width = max(len(leaf) for group in groups.values() for leaf in group) + 4
    lines = []
    for title, members in groups.items():
        lines.append(f"| {title + '/':<{width}} |            |")
        lines += [f"|    {leaf:<{width - 3}} | {value:<10.4g} |" for leaf, value in members.items()]
    rule = "-" * len(lines[0])
    return "\n".join([rule, *lines, rule])
