"""Stable-Baselines3's way of naming a policy, in our settings, and its table of figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psigrad.control.vector import Environments
from psigrad.errors import UserError, nearest

MLP, CNN = "MlpPolicy", "CnnPolicy"
# What a policy's name sets, below what is given. CnnPolicy: Mnih et al. 2015, whose layers policy and critic share.
SETTINGS: dict[str, dict[str, Any]] = {
    MLP: {},
    CNN: {"network.net_arch": (512,), "network.activation": "relu", "network.critic": "shared"},
}
_ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu"}


def named(policy: Any, env: Any) -> str | None:
    """The policy's name in `PPO("MlpPolicy", env)`; None for `PPO(env)`. Raises `UserError` for a policy there is not."""
    if not (isinstance(policy, str) and policy.endswith("Policy")):
        if env is not None:
            raise UserError(
                f"Two environments were given, {policy!r} and {env!r}; expected one, or a policy's name first: {MLP}."
            )
        return None
    if policy == "MultiInputPolicy":
        raise UserError(
            f"There is no MultiInputPolicy; expected {' or '.join(SETTINGS)}; flatten the observations, by "
            "gymnasium.wrappers.FlattenObservation for example."
        )
    if policy not in SETTINGS:
        raise UserError(f"There is no policy {policy!r}; expected {' or '.join(SETTINGS)}{nearest(policy, SETTINGS) or '.'}")
    if env is None:
        raise UserError(f'No environment was given beside {policy!r}; for example PPO("{policy}", "CartPole-v1").')
    return policy


def check(policy: str | None, envs: Environments) -> None:
    """Raises `UserError` for a `CnnPolicy` on what is no image."""
    if policy == CNN and envs.image is None:
        raise UserError(f"{CNN} needs images, and an observation here is {envs.spaces[0]}; use {MLP}.")


def translated(policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings of Stable-Baselines3's `policy_kwargs`. Raises `UserError` for one that has no equal here."""
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


# Stable-Baselines3's arguments that have no equal: the values that ask for nothing, and what to do about others.
_TRACKED = "psigrad control --report-to tensorboard writes such logs; in Python, a callback gets every figure"
_WITHOUT_EQUAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_sde": ((False,), "there is no gSDE here"),
    "sde_sample_freq": ((-1,), "there is no gSDE here"),
    "use_rms_prop": ((True,), "the optimiser is optimizer='adam' or 'rmsprop'"),
    "clip_range_vf": ((None,), "the critic's loss is not clipped"),
    "stats_window_size": ((100,), "figures are over the last 100 episodes"),
    "optimize_memory_usage": ((False,), "bytes of images are kept as bytes already"),
    "tensorboard_log": ((None,), _TRACKED),
    "tb_log_name": ((), _TRACKED),
    "reset_num_timesteps": ((False,), "steps are always counted on; for a fresh start make a new agent"),
}


def without_foreign(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without Stable-Baselines3's that have no equal here, where they ask for nothing; `device` where it names the
    CPU, on which control always runs.

    Raises `UserError` where they ask for something, and for a schedule that is a function.
    """
    rest = dict(settings)
    for name, (idle, advice) in _WITHOUT_EQUAL.items():
        if name in rest and (value := rest.pop(name)) not in idle:
            raise UserError(f"{name} is {value!r}, which has no equal here: {advice}; leave it out.")
    for name, schedule in (("learning_rate", "lr_scheduler_type"), ("clip_range", "clip_range_schedule")):
        if callable(rest.get(name)):
            raise UserError(f"{name} is a function; expected its first value, and {schedule}='linear' to let it fall to 0.")
    asked = str(rest.pop("device", "auto"))
    if asked not in ("auto", "cpu"):
        raise UserError(
            f"device is {asked!r}, and control runs on the CPU, which is faster for networks of this size; leave it out."
        )
    return rest


def table(figures: Mapping[str, float]) -> str:
    """Figures as aligned lines, grouped by what stands before the slash."""
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
