"""Names of rl-zoo3's command line, for control: `other_names` takes them up."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from psigrad.errors import UserError, nearest

# The same setting under another name.
SAME = {
    "algo": "algorithm",
    "n_timesteps": "total_timesteps",
    "n_eval_episodes": "eval_episodes",
    "num_threads": "run.threads",
}
# Values that mean something of ours.
VALUES: dict[str, dict[Any, dict[str, Any]]] = {
    "policy": {
        "MlpPolicy": {},
        "MultiInputPolicy": {},
        "CnnPolicy": {"network.net_arch": (512,), "network.activation": "relu", "network.critic": "shared"},
    },
    "use_sde": {False: {}},
}
# Another setting, or one that counts otherwise: what to write.
INSTEAD = {
    "policy": "the network of control is net_arch, activation, critic and cnn, and a language model is model",
    **dict.fromkeys(("use_sde", "sde_sample_freq"), "there is no gSDE; the first deviation of real actions is log_std_init"),
    **dict.fromkeys(("hyperparams", "hyperparameters"), "hyperparameters are settings one by one, as learning_rate=1e-3"),
    "eval_freq": "evaluation is asked for by eval_steps",
    "save_freq": "checkpoints are asked for by save_steps and save_minutes",
    "track": "trackers are report_to=wandb, tensorboard or trackio",
    "policy_kwargs": "write net_arch: [64, 64], activation: relu and log_std_init: -2 as settings",
    **dict.fromkeys(("env_wrapper", "frame_stack"), "wrappers are wrappers: [module:Class]"),
    **dict.fromkeys(("conf_file", "trained_agent"), "settings are --config FILE, and a run goes on by the same --output-dir"),
    **dict.fromkeys(("optimize", "n_trials"), "there is no search for hyperparameters: call psigrad.control from Optuna"),
    "hyperparameter": "hyperparameters are settings one by one, as learning_rate=1e-3",
    "tensorboard_log": "trackers are report_to=wandb, tensorboard or trackio",
    "vec_env": "how copies of an environment are stepped is vectorization=serial, sync or async",
}


def of_environment(in_file: Mapping[str, Any], env: Any, source: str) -> dict[str, Any]:
    """The settings of a file; of one of rl-zoo3's, whose sections are environments, those of `env`, under our names. Without
    `env` the file must have one section. Raises `UserError` where it has none of that environment.
    """
    sections = {name: part for name, part in in_file.items() if isinstance(part, Mapping) and _is_zoo(part)}
    if not sections or len(sections) < len(in_file):
        return dict(in_file)
    name = env if env is not None else next(iter(sections))
    if name not in sections or (env is None and len(sections) > 1):
        asked = f"no section {env!r}" if env is not None else "a section for each environment"
        raise UserError(f"{source} has {asked}; name one of {', '.join(sections)} by --env{nearest(str(name), sections) or '.'}")
    found: dict[str, Any] = {"env": name}
    for key, value in sections[name].items():
        if isinstance(value, str) and key in _SCHEDULES and value.startswith("lin_"):  # falls to 0 from this value
            found[key], found[_SCHEDULES[key]] = float(value[4:]), "linear"
        elif key == "normalize":
            found |= _normalized(value, source)
        else:
            found[key] = int(value) if isinstance(value, float) and value.is_integer() and value > 1 else value
    return found


_SCHEDULES = {"learning_rate": "lr_scheduler_type", "clip_range": "clip_range_schedule"}


def _normalized(value: Any, source: str) -> dict[str, Any]:
    """rl-zoo3's `normalize`: yes, no, or VecNormalize's arguments, which it writes as the text of a dict."""
    try:
        asked = ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        asked = None
    if isinstance(asked, Mapping):
        of, rewards = asked.get("norm_obs", True), asked.get("norm_reward", True)
        rest = set(asked) - {"norm_obs", "norm_reward"}
        if isinstance(of, bool) and isinstance(rewards, bool) and not rest:
            return {"normalize_observations": of, "normalize_rewards": rewards}
    elif isinstance(asked, bool):
        return {"normalize_observations": asked, "normalize_rewards": asked}
    raise UserError(
        f"{source}: normalize is {value!r}; expected true, false, or norm_obs and norm_reward with true or false. Other settings "
        "of VecNormalize have no equal here."
    )


def _is_zoo(part: Mapping[str, Any]) -> bool:
    return "policy" in part or "n_timesteps" in part
