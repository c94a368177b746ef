"""beta, epsilon, gae_lambda, …: parts of the algorithm as settings of their own."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest
from cases import repeat_for

from psigrad import cli
from psigrad.cli import flags
from psigrad.compat.foreign_names import load, resolve_names
from psigrad.config import OnlineConfig, PreferenceConfig, shortcuts
from psigrad.config.algorithms import resolve_loss, resolve_online
from psigrad.config.methods import list_declarations
from psigrad.config.shortcuts import SHORTCUTS, find_values
from psigrad.errors import UserError
from psigrad.language.recipes import online_settings
from psigrad.objective import PolicyGradient, catalog
from psigrad.objective.parts.advantage import gae, group_mean, whitened
from psigrad.objective.parts.aggregate import has_signal, not_truncated, sequence_mean, top_entropy
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.group_advantage import group_mean_batch_std
from psigrad.objective.parts.ratio import KL, sequence
from psigrad.objective.parts.surrogate import clip, truncated_weight
from psigrad.objective.preferences import preference_catalog

METHODS = [name for name, d in list_declarations().items() if d.settings in (OnlineConfig, PreferenceConfig)]


def seen(value):
    """A part as `shortcuts` describes it: its name, and its parameters where they are parts, numbers or words."""
    if isinstance(value, tuple):
        return tuple(map(seen, value))
    if is_dataclass(value):
        return type(value).__name__, {f.name: seen(getattr(value, f.name)) for f in fields(value) if f.name != "name"}
    return (value.__name__, {}) if callable(value) else value


def read(value):
    if isinstance(value, tuple):
        return tuple(map(read, value))
    if isinstance(value, shortcuts.Part):
        return value.name, {name: read(inner) for name, inner in value.parameters.items() if name != "name"}
    return value


def resolved(name: str, *given: str):
    declaration = list_declarations()[name]
    config = flags.parse(declaration.settings, name, given, declaration.defaults)
    return resolve_online(config.algorithm) if declaration.online else resolve_loss(config.loss)


@repeat_for("name", [n for n in METHODS if n != "online_dpo"])
def test_the_parts_that_a_setting_changes_are_those_of_the_object(name):
    known = {**catalog.METHODS, **preference_catalog.METHODS}
    assert read(shortcuts.describe_method(name)) == seen(known[name].algorithm)


@pytest.mark.parametrize("name", METHODS)
def test_every_flag_of_a_methods_help_changes_that_and_nothing_else(name):
    before = resolved(name)
    for short in SHORTCUTS:
        places = find_values(short, name)
        flag = f"--{short.replace('_', '-')}"
        if not places:
            with pytest.raises(UserError, match=r"has no effect; remove it, or choose a method with one: .*[a-z]"):
                resolved(name, flag, *([] if SHORTCUTS[short].switch else ["0.3"]))
            continue
        now = places[0][1]
        given = (
            [flag] if SHORTCUTS[short].switch else [flag, "null" if now is None and short == "top_entropy_quantile" else str(now)]
        )
        if now is None or short == "ent_coef" or (short == "beta" and not now):
            continue  # it has none yet; below
        after = resolved(name, *([f"--no-{flag[2:]}"] if SHORTCUTS[short].switch and not now else given))
        differs = [f.name for f in fields(before) if seen(getattr(before, f.name)) != seen(getattr(after, f.name))]
        equal = short == "epsilon" and len({value for _, value in places}) > 1
        assert not set(differs) - {"name", *(["surrogate"] if equal else [])}, (short, differs)


WRITTEN = {
    ("grpo", "--beta", "0.1"): replace(catalog.GRPO, kl=KL("loss", "k3", 0.1)),
    ("dr_grpo", "--beta", "0.1"): replace(catalog.DR_GRPO, kl=KL("loss", "k3", 0.1)),
    ("ppo", "--beta=0.1"): replace(catalog.PPO, kl=KL("reward", "k1", 0.1)),
    ("rloo", "--beta", "0", "--epsilon=0.3"): replace(catalog.RLOO, kl=KL("reward", "k1", 0), surrogate=clip(0.3, 0.3)),
    ("grpo", "--epsilon-high", "0.3", "--epsilon", "0.1"): replace(catalog.GRPO, surrogate=clip(0.1, 0.3)),
    ("grpo", "--scale_rewards", "none"): replace(catalog.GRPO, psi=group_mean(std=False)),
    ("grpo", "--scale_rewards", "false"): replace(catalog.GRPO, psi=group_mean(std=False)),
    ("grpo", "--scale_rewards", "batch"): replace(catalog.GRPO, psi=group_mean_batch_std()),
    ("reinforce_pp_baseline", "--scale-rewards", "group"): replace(catalog.REINFORCE_PP_BASELINE, psi=whitened(group_mean())),
    ("cispo", "--epsilon_high", "4"): replace(catalog.CISPO, surrogate=truncated_weight(4)),
    ("ppo", "--gae_lambda", "0.95", "--gamma", "0.99"): replace(catalog.PPO, psi=whitened(gae(0.99, 0.95))),
    ("ppo", "--lam", "0.5"): replace(catalog.PPO, psi=whitened(gae(1.0, 0.5))),
    ("vc_ppo", "--gamma", "0.9"): replace(
        catalog.VC_PPO, psi=whitened(gae(0.9, 0.95)), critic=value_loss(0.1, 0.2, gae(0.9, 1.0))
    ),
    ("ppo", "--vf_coef", "0.5", "--cliprange_value", "null"): replace(catalog.PPO, critic=value_loss(0.5, None)),
    ("grpo", "--entropy_coeff", "0.02"): replace(catalog.GRPO, entropy=bonus(0.02)),
    ("grpo", "--loss_agg_mode", "seq-mean-token-mean"): replace(catalog.GRPO, aggregate=sequence_mean),
    ("dapo", "--importance_sampling_level", "sequence", "--no-mask-truncated-completions"): replace(
        catalog.DAPO, ratio=sequence, keep=(has_signal,)
    ),
    ("grpo", "--dynamic-sampling", "--top_entropy_quantile", "0.2", "--mask_truncated_completions", "true"): replace(
        catalog.GRPO, keep=(not_truncated, has_signal, top_entropy(0.2))
    ),
    ("top_entropy", "--top_entropy_quantile", "null"): replace(catalog.TOP_ENTROPY, keep=catalog.DAPO.keep),
    ("vapo", "--epsilon", "0.2", "--epsilon-high", "0.28"): catalog.VAPO,
    ("dpo", "--beta", "0.3"): replace(preference_catalog.DPO, beta=0.3),
    ("cdpo", "--label_smoothing", "0.2"): resolve_loss({"preset": "dpo", "link": {"part": "logistic", "label_smoothing": 0.2}}),
    ("simpo", "--simpo_gamma", "0.5", "--cpo_alpha", "0.1"): replace(preference_catalog.SIMPO, margin=0.5, sft=0.1),
    ("kto", "--desirable_weight", "2"): replace(preference_catalog.KTO, desirable_weight=2),
}


@repeat_for("given", WRITTEN)
def test_a_flag_says_what_the_parts_say(given):
    assert seen(replace(resolved(*given), name="")) == seen(replace(WRITTEN[given], name=""))


def test_online_dpos_loss_has_them_too():
    assert resolved("online_dpo", "--beta", "0.3").loss.beta == 0.3


def test_files_overrides_and_python_take_them(tmp_path):
    (tmp_path / "run.yaml").write_text("epsilon_high: 0.28\nbeta: 0.0\nalgorithm: grpo\nepsilon: 0.1\n")
    config = load(OnlineConfig, tmp_path / "run.yaml", ["algorithm.kl.coefficient=0.5"])
    assert resolve_online(config.algorithm).surrogate == clip(0.1, 0.28)
    assert resolve_online(config.algorithm).kl.coefficient == 0.5, "an override beats the file"
    over = load(OnlineConfig, None, ["algorithm.kl.coefficient=0.5"], resolve_names(OnlineConfig, {"beta": 0.2}))
    assert resolve_online(over.algorithm).kl.coefficient == 0.2, "a flag beats an override"
    mine = {"preset": "ppo", "psi": "gae", "kl": None}
    changed = resolve_online(load(OnlineConfig, flags={"algorithm": mine, "gae_lambda": 0.5, "beta": 0.1}).algorithm)
    assert changed.psi == gae(1.0, 0.5) and changed.kl == KL("reward", "k1", 0.1)
    assert mine == {"preset": "ppo", "psi": "gae", "kl": None}, "what the caller gave stays as it is"


def test_a_parameter_of_a_part_within_a_part_is_changed_where_it_stands():
    assert resolve_online({"preset": "ppo", "psi": {"psi": {"lam": 0.5}}}).psi == whitened(gae(1.0, 0.5))
    assert resolve_online({"preset": "vc_ppo", "critic": {"returns": {"lam": 0.5}}}).critic.returns == gae(1.0, 0.5)
    with pytest.raises(UserError, match="gae has no parameter 'lambda'"):
        resolve_online({"preset": "ppo", "psi": {"psi": {"lambda": 0.5}}})


def test_fixed_length_by_name_is_the_longest_completion():
    config = flags.parse(
        OnlineConfig, "grpo", ["--aggregate", "fixed_length", "--max-completion-length", "7"], {"algorithm": "grpo"}
    )
    assert online_settings.method(config).aggregate.n == 7


@pytest.mark.parametrize("value", ["many", "{part: clip}"])
def test_a_wrong_value_is_one_sentence(value, tmp_path, capsys):
    assert cli.main(["explain", "grpo", f"algorithm.kl.coefficient={value}"]) == 2
    arguments = ["grpo", "--beta", value, "--model", "x", "--dataset", "x", "--reward", "exact", "--output-dir", str(tmp_path)]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_an_object_is_changed_by_itself():
    with pytest.raises(UserError, match="beta can change only a preset, but algorithm is a PolicyGradient; give"):
        load(OnlineConfig, flags={"algorithm": catalog.GRPO, "beta": 0.1})
    assert isinstance(resolve_online(catalog.GRPO), PolicyGradient)


def test_help_shows_what_a_method_has(capsys):
    for name, shown, hidden in (("ppo", "--gae-lambda", "--margin"), ("grpo", "--scale-rewards", "--gae-lambda")):
        with pytest.raises(SystemExit):
            cli.main([name, "--help-all"])
        text = capsys.readouterr().out
        assert shown in text and hidden not in text
