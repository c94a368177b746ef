"""Facts about a run: its method and settings, time, duration, commands, machine and versions."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from psigrad.config import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.fields import defaults_of
from psigrad.config.nested import flatten
from psigrad.records.read import RunData, clip, kind_of
from psigrad.records.rows import number

_CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "preference": PreferenceConfig}


def facts(run: RunData) -> list[tuple[str, str]]:
    """Return (name, text) for the run's start, duration, commands, machine and versions, and for reasons why it is slow.

    Omit facts that were not recorded.
    """
    starts = run.starts
    began = format_time(number(run.events[0].get("time"))) if run.events else ""
    commands = list(dict.fromkeys(str(event["command"]) for event in starts if event.get("command")))
    machine = next((m for event in reversed(starts) if isinstance(m := event.get("machine"), dict)), {})
    last = run.last_event("started", "resumed")
    limits = [f"{n} {name}{'s' * (n != 1)}" for name in ("core", "thread") if (n := machine.get(f"{name}s"))]
    on = (machine.get("processor"), *limits, last.get("instructions"), machine.get("gpu"))
    again = run.last_event("forward_again")  # training did not reuse the activations of sampling
    slower = (str(last.get("slower") or ""), str(again.get("why")) if again else "")
    versions = machine.get("versions")
    facts = [
        ("Started", f"{began}, resumed {_times(len(starts) - 1)}" if began and len(starts) > 1 else began),
        ("Took", _describe_duration(run)),
        ("Command", "\n".join(clip(command, 1000) for command in commands[-3:])),
        ("On", ", ".join(str(part) for part in on if part)),
        ("Slower", "\n".join(filter(None, slower))),
        ("Sampler against trainer", _describe_sampler_gap(run)),
        ("With", ", ".join(f"{name} {number}" for name, number in versions.items()) if isinstance(versions, dict) else ""),
    ]
    return [(name, said) for name, said in facts if said]


def _describe_sampler_gap(run: RunData) -> str:
    """Describe the difference between the sampler's and the trainer's log-probs; "" if it was not measured."""
    mean, most, share = (run.series(f"sampling/sampling_logp_difference/{name}")[1] for name in ("mean", "max", "share"))
    if not share:
        return ""
    said = f"{sum(share) / len(share):.2g} of the compared tokens have different log-probs"
    return (
        f"{said} (mean difference {sum(mean) / len(mean):.2g}, maximum {max(most):.2g})"
        if max(most)
        else "all log-probs equal to the last bit"
    )


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n:,} times"


def _describe_duration(run: RunData) -> str:
    """Describe the run's duration, and how much of it was spent in steps and evaluations.

    Pauses between a stop and the next start do not count.
    """
    spent, life, before = 0.0, math.nan, math.nan
    for event in run.events:
        now = number(event.get("time"))
        if event.get("kind") in ("started", "resumed"):
            spent += before - life if math.isfinite(before - life) else 0.0
            life = now
        before = now if math.isfinite(now) else before
    spent += before - life if math.isfinite(before - life) else 0.0
    busy = sum(run.series("step_time")[1])
    if spent >= busy > 0:
        return f"{_span(spent)}, of which {_span(busy)} in steps and evaluations"
    return f"{_span(busy)} in steps and evaluations" if busy else _span(spent) if spent else ""


def _span(seconds: float) -> str:
    whole = round(seconds)
    return (
        f"{whole // 3600} h {whole // 60 % 60} min"
        if whole >= 3600
        else f"{whole // 60} min {whole % 60} s"
        if whole >= 60
        else f"{whole} s"
    )


def format_time(seconds: float) -> str:
    """Return a time, in seconds since 1970, as text in UTC; "" for an invalid time."""
    if not (math.isfinite(seconds) and 0 <= seconds < 1e11):
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def describe_method(run: RunData) -> str:
    """Describe the run in one line, such as "grpo on MODEL against REWARD: 8 prompts × 8 completions per step"."""
    given = run.settings
    model = f"{given.get('model.path', 'a model')}" + (f", LoRA of rank {r}" if (r := given.get("model.lora_rank")) else "")
    kind = kind_of(run.config)
    if kind == "control":
        name = _name_of(run.config.get("algorithm", "?"), "a policy gradient")
        return f"{name} on {run.config.get('env') or 'an environment'}: {given.get('n_envs', '?')} copies"
    if kind == "reward":
        return f"reward model from {model}: {given.get('batch_size', '?')} pairs per step"
    if kind == "preference":
        name = _name_of(run.config.get("loss", "?"), "a preference loss")
        return f"{name} on {model}: {given.get('batch_size', '?')} pairs per step"
    if kind == "sft":
        return f"supervised fine-tuning of {model}: {given.get('batch_size', '?')} rows per step"
    algorithm = _name_of(run.config.get("algorithm", "?"), "a policy gradient")
    rewards = run.config.get("reward")
    against = f" against {', '.join(map(str, rewards))}" if isinstance(rewards, list) and rewards else ""
    shape = f"{given.get('prompts_per_step', '?')} prompts × {given.get('num_generations', '?')} completions per step"
    return f"{algorithm} on {model}{against}: {shape}"


def _name_of(method: Any, unnamed: str) -> Any:
    return method.get("name") or method.get("preset") or unnamed if isinstance(method, dict) else method


def settings_class(config: Mapping[str, Any]) -> Any:
    """Return the class of a run's settings."""
    kind = kind_of(config)
    # the core must not import psigrad.control at import time, and a report needs only its settings
    return import_module("psigrad.control.settings").ControlConfig if kind == "control" else _CONFIGS.get(kind, OnlineConfig)


def overrides(run: RunData) -> dict[str, Any]:
    """Return the settings that differ from the defaults, by dotted name."""
    defaults = flatten(defaults_of(settings_class(run.config)))
    given = {name: value for name, value in run.settings.items() if name not in ("recipe", "format")}
    return {name: value for name, value in given.items() if value != defaults.get(name)}
