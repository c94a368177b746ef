"""Writes docs/methods/: one page per preset out of the idea below, `psigrad explain`, and a measured curve.

python docs/make/methods.py pages                       the pages alone
python docs/make/methods.py curves SFT_MODEL DATA RUNS  trains every preset from one SFT model (the demo's), then draws docs/images/
python docs/make/methods.py preferences SFT_MODEL PAIRS RUNS   the same for the preference losses
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from psigrad.config import algorithms
from psigrad.objective import catalog
from psigrad.objective.catalog import METHODS
from psigrad.objective.explain import MEANING
from psigrad.objective.preferences import preference_catalog
from psigrad.objective.preferences.preference_catalog import METHODS as LOSSES

DOCS = Path(__file__).parents[1]

IDEAS = {
    "reinforce": (
        "REINFORCE",
        "The whole completion is one action. Its reward is the score minus a price for moving away from the reference model; the "
        "batch's mean reward is the baseline. There is no ratio and no clip: every batch is used once, fresh.",
        "Use it as the plain starting point. It needs no groups: one completion per prompt is enough.",
        "TRL has no REINFORCE trainer; its RLOO is the nearest.",
    ),
    "reinforce_moving_average": (
        "REINFORCE with a moving-average baseline",
        "As REINFORCE, with the running mean of earlier batches' rewards as the baseline. The baseline then does not depend on the batch "
        "that it is subtracted from, so the gradient is unbiased even for a batch of one.",
        "Use it when a step holds very few completions.",
        "TRL has no such trainer.",
    ),
    "reinforce_total_return": (
        "REINFORCE, total return",
        "The textbook form: every step of a trajectory is weighted by the trajectory's whole return. No baseline, no reference.",
        "Use it to see why baselines exist. It is unbiased and has the largest variance of all forms.",
        "TRL has no such trainer.",
    ),
    "reinforce_reward_to_go": (
        "REINFORCE, reward-to-go",
        "A step is weighted by the rewards that come after it: those that came before cannot have been caused by it. The expectation is that "
        "of the total return, the variance is lower. With a single reward at the end of a completion the two are the same.",
        "Use it where rewards come along the way: grid worlds, CartPole, process rewards.",
        "TRL has no such trainer.",
    ),
    "rloo": (
        "RLOO",
        "Each completion is compared with the mean of the other completions of its prompt. The baseline does not contain the completion's own "
        "reward, so the gradient is unbiased. The completion is one action with one ratio; the KL penalty is part of the reward.",
        "Use it where GRPO's division by the group's standard deviation is unwanted and an unbiased gradient matters.",
        "Same as TRL's RLOOTrainer: beta 0.05 in the reward, clip at the level of the completion.",
    ),
    "grpo": (
        "GRPO",
        "Each completion is compared with its group: its reward minus the group's mean, in units of the group's standard deviation. No "
        "critic is needed. The KL to the reference is a term of the loss.",
        "Use it as the default for verifiable rewards.",
        "This is the paper's: beta 0.04 and a mean per sequence. TRL's defaults are beta 0 and its loss_type dapo: "
        "`algorithm.kl=null algorithm.aggregate=token_mean`. With a beta TRL also weights the KL by the ratio "
        "(`use_bias_correction_kl`, on by default): `algorithm.kl.importance_weighted=true`.",
    ),
    "dr_grpo": (
        "Dr. GRPO",
        "GRPO without the two divisions that bias it: by the standard deviation, which favours prompts that are nearly solved or nearly "
        "hopeless, and by the completion's own length, which makes long wrong answers cheap.",
        "Use it when wrong completions grow longer and longer under GRPO.",
        "As TRL's loss_type dr_grpo with scale_rewards none; the constant is max_completion_length.",
    ),
    "dapo": (
        "DAPO",
        "Four changes to GRPO: a higher upper clip keeps unlikely tokens alive; groups whose rewards are all equal are replaced by fresh "
        "prompts; every token of the batch weighs the same; completions that were cut are left out. There is no KL term.",
        "Use it for long completions and for tasks where many prompts are solved always or never.",
        "TRL's loss_type dapo is the token-level loss alone; the rest are options there. The soft overlong punishment is the reward "
        "`soft_overlong`.",
    ),
    "gspo": (
        "GSPO",
        "The ratio is that of the whole sequence, brought to the scale of one token by the length-th root. All tokens of a completion are "
        "clipped or kept together, and the clip range is much narrower.",
        "Use it with several passes over a batch, and for mixture-of-experts models, whose token ratios are noisy.",
        "As TRL's importance_sampling_level sequence with the paper's clip range.",
    ),
    "cispo": (
        "CISPO",
        "The ratio is a weight that is truncated from above and carries no gradient; the gradient flows through log pi of every token. No "
        "token is ever clipped out, so rare and decisive ones keep teaching.",
        "Use it with several passes over a batch, when clipping throws the interesting tokens away.",
        "As TRL's loss_type cispo.",
    ),
    "reinforce_pp": (
        "REINFORCE++",
        "Rewards-to-go with the KL in the reward per token, whitened over the whole batch instead of within a prompt's group, under PPO's "
        "clip. It needs no groups.",
        "Use it with one completion per prompt, or where groups are too small for their own statistics.",
        "TRL has no such trainer; OpenRLHF has.",
    ),
    "ppo": (
        "PPO",
        "A critic says for every token what reward to expect from there; the advantage of a token is what came out beyond it (GAE). The "
        "KL to the reference is paid in the reward of each token. Each batch is used for several passes, with the ratio clipped.",
        "Use it where rewards come along the way (process rewards, episodes of several turns) or where a prompt cannot be sampled "
        "several times. It keeps a critic in memory: a model of its own, or a value head on the policy (`--critic-shared`).",
        "TRL 1.16 has no PPOTrainer any more. The one it had took a reward model only; this takes reward functions, reward models and "
        "mixtures of them. The defaults are its: 4 passes, clip 0.2 for policy and value, vf_coef 0.1, kl_coef 0.05, gamma 1. Its lambda "
        "was 0.95; here it is 1, which Ahmadian et al. 2024 (arXiv:2402.14740) find best for language models.",
    ),
    "ppo_penalty": (
        "PPO with a KL penalty",
        "As PPO, with a penalty on KL(π_old‖π) in place of the clip. Its coefficient doubles when a batch moved the policy by more than 1.5 "
        "times the target, and halves when it moved it by less than the target / 1.5.",
        "Use it to bound how far each batch moves the policy by a number with a unit (nats per token).",
        "TRL never had it.",
    ),
    "vc_ppo": (
        "VC-PPO",
        "PPO for long completions. With λ below 1 the reward at the end of a long completion hardly reaches its first tokens; with λ of 1 "
        "the policy's gradient is noisy. So the critic learns from whole returns (λ = 1) and the policy from λ = 0.95. The critic learns "
        "alone for some steps first (`--critic-warmup-steps`): a critic that knows nothing yet would mislead the policy.",
        "Use it in the place of PPO when completions are long. Give the critic a warm-up: the paper pretrains it until its error is flat.",
        "TRL has no such trainer; verl has the warm-up of the critic (trainer.critic_warmup).",
    ),
    "vapo": (
        "VAPO",
        "VC-PPO with three more parts. λ grows with the length of the completion, so that the reward arrives in short and in long ones. "
        "The upper clip is higher than the lower, as in DAPO. The right answers of a batch are imitated besides, with a small weight: what "
        "was found once is not lost again.",
        "Use it with a critic and several completions per prompt, on tasks whose answers are right or wrong. A right answer has a reward of "
        "at least 1; set `algorithm.surrogate.right` for another scale. Where completions have fewer than some hundred tokens, set "
        "`algorithm.psi.psi.alpha` to 2 or more: the paper's 0.05 gives completions of up to 20 tokens λ = 0. The paper samples 16 completions per prompt and warms the critic up "
        "for 50 steps.",
        "TRL has no such trainer.",
    ),
    "reinforce_pp_baseline": (
        "REINFORCE++ with the group's mean",
        "Each completion is compared with the mean of its group, without a division by the group's deviation; then the advantages are whitened "
        "over the whole batch. The KL to the reference is a term of the loss.",
        "Use it where GRPO's scaling of each prompt by its own deviation is unwanted.",
        "TRL has no such trainer; OpenRLHF and verl have.",
    ),
    "opo": (
        "OPO",
        "Exactly on-policy REINFORCE. The baseline is the group's mean reward weighted by length: where long completions have large scores, "
        "this baseline leaves the least variance. There is no clip, no KL term and no entropy bonus.",
        "Use it with one update for each batch, where a stable entropy matters.",
        "TRL has no such trainer; verl has.",
    ),
    "maxrl": (
        "MaxRL",
        "Each completion is compared with its group's mean reward, in units of that mean: a rare success weighs more than a common one. For "
        "rewards of 0 and 1 the expected gradient is that of the first terms of the logarithm of the success rate, where RL has only the "
        "first. More completions for each prompt give more terms.",
        "Use it for right-or-wrong rewards and hard prompts. Rewards must not be negative.",
        "TRL has no such trainer; prime-rl has.",
    ),
    "pass_at_k": (
        "Pass@k training",
        "A group is judged by whether one of k completions is right, and a completion by the choices of k that hold it. Groups that mostly "
        "succeed teach little, so that the policy goes on exploring.",
        "Use it before a stage of GRPO, or where several attempts are allowed. k must be below the size of a group.",
        "TRL has no such trainer; verl has a form of it.",
    ),
    "sapo": (
        "SAPO",
        "The ratio goes through a sigmoid instead of a clip: a token's gradient fades as its ratio leaves 1, sooner where the advantage is "
        "negative.",
        "Use it with several passes over a batch, in the place of GRPO's clip.",
        "As TRL's loss_type sapo; without a KL term.",
    ),
    "dppo": (
        "DPPO",
        "What is bounded is the change of a token's probability, not its ratio: a rare token may grow by a large factor, a likely one not by a "
        "large share. Tokens inside the bound are weighted by their truncated ratio.",
        "Use it with several passes over a batch, or where sampler and trainer differ.",
        "The installed TRL has no such trainer; verl's is dppo_tv.",
    ),
    "gmpo": (
        "GMPO",
        "The ratios of a completion enter by their geometric mean, each clipped in logarithms first: one outlier cannot carry the completion.",
        "Use it with several passes over a batch, when GRPO's ratios have outliers.",
        "As TRL's experimental GMPOTrainer, clip 0.4 in logarithms; without a KL term.",
    ),
    "gdpo": (
        "GDPO",
        "With several reward functions, each is compared within the group by itself, in units of its own deviation; then they are weighted "
        "and added. In GRPO the sum comes first, and completions with the same sum look alike, whichever rewards they earned.",
        "Use it with rewards that differ in kind or in scale, such as correctness and format. With one reward it is GRPO, scaled over the batch.",
        "As TRL's multi_objective_aggregation normalize_then_sum.",
    ),
    "process_grpo": (
        "GRPO with process supervision",
        "Rewards are given for steps inside a completion, by a process reward model or by an environment after each turn. All rewards of a "
        "group are standardised together; a token's advantage is the sum of those that come at or after it.",
        "Use it with a process reward model (`--reward-model`), or with environments that reward each turn. With a single reward at the end it "
        "is GRPO.",
        "TRL's GRPOTrainer has outcome rewards only.",
    ),
    "top_entropy": (
        "Top-entropy tokens (80/20)",
        "DAPO, learning only from the fifth of the batch's tokens at which the policy was least sure: there it decides, elsewhere it fills in.",
        "Use it for long reasoning. It does harm where most tokens do not matter and stay random: those are then the ones that it learns from.",
        "As TRL's top_entropy_quantile 0.2; TRL takes the entropy of the pass that trains, psigrad that of the policy that sampled, for "
        "the whole batch. The change of the loss from one pass to the next does not move the choice.",
    ),
    "clip_cov": (
        "Clip-Cov",
        "Entropy falls most by tokens that are likely already and have a high advantage. A few of these, drawn at random, get no gradient.",
        "Use it in long runs whose entropy collapses, with many tokens in a step: a share of 2e-4 is one token in 5,000.",
        "TRL has no such option; verl's is clip_cov.",
    ),
    "kl_cov": (
        "KL-Cov",
        "The same tokens, those with the greatest covariance of log-probability and advantage, are held where they are by a penalty on the "
        "logarithm of their ratio. There is no clip.",
        "Use it in long runs whose entropy collapses. It needs several optimiser steps for each batch; the preset takes four.",
        "TRL has no such option; verl's is kl_cov.",
    ),
    "distill": (
        "On-policy distillation",
        "A smaller model answers the prompts itself, and at each token the divergence from a teacher pulls it towards what the teacher would "
        "do there. Unlike in supervised fine-tuning on the teacher's texts, it learns in the states that it comes into itself. No reward is needed.",
        "Use it to hand a large or specialised model's skill to a small one (`--reference TEACHER`), or with `--teacher-prompt COLUMN` to teach a "
        "model what it can do when it is told more. `algorithm.kl.estimator` takes `exact` (the reverse KL), `exact_forward`, `exact_js`, all "
        "summed over the vocabulary, or `k1+`, the reverse KL on the sampled tokens alone. A teacher may stand behind a server (`--reference "
        "http://…/v1`), or have another tokenizer (`span`): see [Runs](../runs.md#a-teacher-a-reference-that-follows).",
        "The divergences are those of TRL's GKDTrainer with lmbda 1: its beta is `algorithm.kl.mixture`, its ends are `exact_forward` and `exact`.",
    ),
    "raft": (
        "RAFT",
        "Keep the best completion of each prompt and train on it by cross-entropy. There is no baseline and no bad example: the policy "
        "only ever imitates its own best.",
        "Use it as the strong simple baseline, and to see what negative examples add.",
        "TRL has no such trainer.",
    ),
}

MEASURED = (
    "Measured on the demo's task: 200 steps of 16 prompts × 8 completions from the same SFT model, one seed, learning rate 3e-4 for all, 4 passes for methods with a critic; in vc_ppo and vapo the critic learns alone for the first 20 steps, and vapo has an α of 2.5, as completions have eight tokens (with 0.05 it ends at 0.43). "
    "distill learnt from the model that OPO's run left, without a reward. Bold is this method, thin lines are others that were measured with it, the band is the 95 % interval over 400 held-out words. It shows that the method learns; "
    "one seed on one task ranks nothing, and DAPO draws fresh prompts for those without signal, so it sees more samples."
)


SLOT_NAMES = {*MEANING.values(), "score", "link"}
UNMEASURED = "No curve has been measured yet."


def page(name: str) -> str:
    """The text of one method's page."""
    parts = algorithms.resolve(name)
    teacher = "--reference TEACHER" if not parts.needs_reward else "--reward my_module:my_reward"
    return f"""{_head(name)}

{_optimised(name)}

## Run it

```
psigrad {name} \\
  --model PATH_OR_HUB_NAME --dataset prompts.jsonl {teacher}
```

## Measured

{_curve(name, f"held-out accuracy of {name}", MEASURED)}
"""


def _optimised(name: str) -> str:
    """What the method minimises, part by part, and its declaration. `psigrad explain` says the same in the terminal."""
    return f"""## What is optimised

{_sections(algorithms.explain(name))}
{_declaration(name)}
`psigrad explain {name}` prints all this; `psigrad explain {name} OTHER` says what differs from another method."""


def _declaration(name: str) -> str:
    """The statement that declares a method, and its file; nothing for one that is declared elsewhere."""
    for module in (catalog, preference_catalog):
        path = Path(str(module.__file__))
        source = path.read_text()
        for node in ast.parse(source).body:
            first = (
                node.value.args[0]
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args
                else None
            )
            if isinstance(first, ast.Constant) and first.value == name:
                where = path.relative_to(DOCS.parent).as_posix()
                return f"\n## As it is declared\n\nIn `{where}`:\n\n```python\n{ast.get_source_segment(source, node)}\n```\n"
    return ""


def _sections(explained: str) -> str:
    """What `explain` prints as Markdown: a paragraph for each slot, formulas as blocks, the empty slots in one line."""
    out: list[str] = []
    empty: list[str] = []
    shift = 0  # how far the lines of a part inside a part are moved to the right
    for line in _unwrapped(explained):
        indent, text = len(line) - len(line.lstrip()), line.strip()
        slot, colon, part = text.partition(": ")
        if not text:
            continue
        if indent == 0:
            shift = 0
            if part.startswith("none:") or (part == "none" and slot in ("critic", "entropy")):
                empty.append(f"{slot}: {part}")
            else:
                out.append(f"**{slot}**: `{part}`" if colon and slot in SLOT_NAMES else text)
        elif (text.startswith("with ") and indent == 4 + shift and "(" in text) or (
            text.startswith("with ") and text.count(" ") == 1
        ):
            out.append(f"with `{text.removeprefix('with ')}`")
            shift = indent
        elif indent >= 8 + shift or (indent == 4 and not shift and not out[-1].startswith("**") and text.startswith("loss(")):
            block = "    " + text
            out[-1] += ("\n" if out[-1].startswith("    ") else "\n\n") + block if out[-1].startswith("    ") else ""
            if not out[-1].endswith(block):
                out.append(block)
        else:
            out.append(text)
    return "\n\n".join([*out, *(["Empty slots: " + "; ".join(empty) + "."] if empty else [])])


def _unwrapped(text: str) -> list[str]:
    """Lines as they were before `explain` broke them: what goes on is indented by two more."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if lines and line.strip() and indent % 4 == 2:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


def _head(name: str) -> str:
    """Title and idea of a page. A method without words of its own has those of its declaration."""
    words = IDEAS.get(name) or PREFERENCES.get(name)
    if words is None:
        return f"# {name}\n\n{(METHODS.get(name) or LOSSES[name]).summary.capitalize()}."
    title, idea, use, trl = words
    return f"# {title}\n\n{idea}\n\n{use}\n\n**Beside TRL.** {trl}"


def _curve(name: str, shows: str, how: str) -> str:
    """The measured curve, where there is one: it takes a trained model, and is made by the maintainers."""
    there = (DOCS / "images" / f"{name}.png").exists()
    return f"![{shows}](../images/{name}.png)\n\n{how}" if there else UNMEASURED


def _called(part: object) -> str:
    """A part as one would write it: its name, with its parameters where it has some."""
    return part.__name__ if hasattr(part, "__name__") else str(part)


PREFERENCES = {
    "dpo": (
        "DPO",
        "The policy itself is the reward model: the log-ratio to the reference, times β, is the reward that the preferences imply. One logistic regression on pairs, no sampling, no reward model.",
        "Use it as the default on recorded comparisons.",
        "Same as TRL's DPOTrainer with loss_type sigmoid.",
    ),
    "cdpo": (
        "Conservative DPO",
        "DPO that believes a share of the labels to be the wrong way round, so that it never becomes sure.",
        "Use it where labellers disagree.",
        "TRL's DPOTrainer ignores label_smoothing with loss_type sigmoid; its robust loss is `robust_dpo`.",
    ),
    "robust_dpo": (
        "Robust DPO",
        "DPO whose expectation under swapped labels is DPO's under right ones.",
        "Use it where the share of wrong labels is known.",
        "Same as TRL's loss_type robust.",
    ),
    "hinge": (
        "Hinge",
        "No loss once the chosen completion leads by 1/β. Pairs that are settled stop pulling.",
        "Use it to keep the policy nearer to the reference than DPO does.",
        "Same as TRL's loss_type hinge.",
    ),
    "ipo": (
        "IPO",
        "The lead is regressed on 1/(2β). It stays finite even where every label agrees, where DPO's lead grows without end.",
        "Use it where preferences are nearly deterministic.",
        "Same as TRL's loss_type ipo: per token. The paper sums over tokens: `loss.score=log_ratio`.",
    ),
    "ln_dpo": (
        "Length-normalised DPO",
        "DPO on log-ratios per token, so that long completions do not count more.",
        "Use it where chosen completions are longer than rejected ones.",
        "Same as TRL's loss_type sigmoid_norm with beta 2.",
    ),
    "simpo": (
        "SimPO",
        "The reward is the log-probability per token, and the chosen one must lead by a margin. There is no reference model.",
        "Use it to save the reference's memory, with a small learning rate: nothing holds the policy back.",
        "TRL has it in experimental CPO, where simpo_gamma is this margin.",
    ),
    "orpo": (
        "ORPO",
        "Supervised fine-tuning on the chosen completions plus a small odds-ratio term that lowers the rejected ones. One stage, no reference.",
        "Use it to go from a base model to a preferring one in one run.",
        "TRL has it in experimental; there the likelihood covers the prompt's tokens too, here the completion's.",
    ),
    "apo_zero": (
        "APO-zero",
        "Raises the chosen and lowers the rejected, each for itself.",
        "Use it where the chosen completions are better than the model's own.",
        "Same as TRL's loss_type apo_zero.",
    ),
    "apo_down": (
        "APO-down",
        "Lowers both, the rejected more.",
        "Use it where the model's own completions are better than the chosen ones.",
        "Same as TRL's loss_type apo_down.",
    ),
    "kto": (
        "KTO",
        "Completions that are good or bad by themselves, without partners: a value function that saturates around the policy's own distance from the reference.",
        "Use it where feedback is thumbs up or down.",
        "Same as TRL's KTOTrainer; a row is mismatched with the one before it that has another prompt.",
    ),
}

PREFERRED = (
    "Measured on the demo's task with a known truth: pairs sampled from the SFT model, each winner drawn by Bradley–Terry on 8 × the similarity to the right answer, "
    "100 steps of 32 pairs, learning rate 1e-4, one seed. The curve is the truth: the similarity of 200 held-out generated completions, which no method ever saw as a number. "
    "Bold is this method, thin lines are the others."
)


def preference_page(name: str) -> str:
    """The text of one preference loss's page."""
    form = "prompt, completion, label" if name == "kto" else "prompt, chosen, rejected"
    return f"""{_head(name)}

{_optimised(name)}

## Run it

```
psigrad {name} --model PATH_OR_HUB_NAME --dataset comparisons.jsonl
```

with rows of `{form}`. [Preferences](../preferences.md) has the forms and what is logged.

## Measured

{_curve(name, f"the truth over steps of {name}", PREFERRED)}
"""


def measure_preferences(model: str, pairs: str, runs: str) -> None:
    """One run per preference loss, and the pictures."""
    import psigrad
    from psigrad_extras.datasets.preferences import split_pairs

    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    for name in LOSSES:
        if _measured(Path(runs) / name, 100):
            continue
        held, train = rows[:200], rows[200:]
        psigrad.train(
            name,
            model=model,
            dataset=split_pairs(train) if name == "kto" else train,
            eval_dataset=split_pairs(held)[::2] if name == "kto" else held,
            metric="similarity",
            output_dir=f"{runs}/{name}",
            max_steps=100,
            learning_rate=1e-4,
            batch_size=64 if name == "kto" else 32,
            max_completion_length=12,
            eval_prompts=200,
            eval_steps=10,
            report=False,
            progress=False,
        )
    curves = {name: _accuracy(Path(runs) / name) for name in LOSSES}
    for name in curves:
        _picture(name, f"{PREFERENCES[name][0]}: the truth over steps", curves)


SLOTS = ("psi", "ratio", "surrogate", "aggregate", "kl", "keep", "critic")


def table() -> str:
    """The text of docs/methods/table.md: every preset and every preference loss by its parts."""
    rows = []
    for name in METHODS:
        parts = algorithms.resolve(name)
        cells = [", ".join(_short(k) for k in parts.keep) if slot == "keep" else _short(getattr(parts, slot)) for slot in SLOTS]
        rows.append(f"| [{name}]({name}.md) | {' | '.join(cell or '–' for cell in cells)} |")
    losses = []
    for name in LOSSES:
        loss = algorithms.resolve_loss(name)
        cells = [_short(getattr(loss, part, None)) for part in ("score", "link")]
        losses.append(f"| [{name}]({name}.md) | {' | '.join(cell or '–' for cell in cells)} | {loss.beta:g} |")
    head = f"| method | {' | '.join(SLOTS)} |\n|---{'|---' * len(SLOTS)}|"
    return f"""# Methods by their parts

Every method is a choice of parts; a dash is an empty slot. Two methods that share a cell run the same code there. Parameters that
are a part's defaults are left out.
`psigrad explain NAME OTHER` prints the formulas and what differs.

{head}
{chr(10).join(rows)}

What each rests on. Enumerated: the gradient over all batches of a small world, summed by the method's own code, is that of the paper's
formula, written a second time (`tests/objective/test_enumerated_gradients.py`). Closed form: it is that of a formula for the expectation.

| method | sources of its parts, on arXiv | gradient | curve |
|---|---|---|---|
{chr(10).join(_proof(name) for name in METHODS)}

Losses on preferences:

| loss | score | link | β |
|---|---|---|---|
{chr(10).join(losses)}
"""


CLOSED = ("reinforce_total_return", "reinforce_reward_to_go", "reinforce_moving_average", "pass_at_k", "distill")


OWN = {"vc_ppo": ("2503.01491",)}  # a paper whose parts are others'


def _enumerated() -> set[str]:
    """The methods whose gradient the tests sum over all batches."""
    source = (DOCS.parent / "tests" / "objective" / "test_enumerated_gradients.py").read_text()
    return set(source.split("FORMULAS = [")[1].split("]")[0].replace(",", " ").split())


def _proof(name: str) -> str:
    """A method's row in the table of proofs."""
    text = " ".join(algorithms.explain(name).split())
    shown = ", ".join(dict.fromkeys([*OWN.get(name, ()), *re.findall(r"arXiv:(\d{4}\.\d{5})", text)]))
    picture = DOCS / "images" / f"{name}.png"
    curve = f"[curve](../images/{name}.png)" if picture.exists() else ""
    return f"| [{name}]({name}.md) | {shown or 'Williams 1992'} | {'closed form' if name in CLOSED else 'enumerated' if name in _enumerated() else ''} | {curve} |"


def _short(part: object) -> str:
    """A part by its name, with the parameters that are not its defaults."""
    if part is None:
        return ""
    if not is_dataclass(part) or isinstance(part, type):
        return str(getattr(part, "__name__", part))
    given = [f for f in fields(part) if f.name != "name" and getattr(part, f.name) != _default(f)]
    said = ", ".join(f"{f.name}={_short_value(getattr(part, f.name))}" for f in given)
    return f"{type(part).__name__}({said})" if said else type(part).__name__


def _default(field: Field[Any]) -> object:
    return (
        field.default if field.default is not MISSING else field.default_factory() if callable(field.default_factory) else MISSING
    )


def _short_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else _short(value) if is_dataclass(value) else str(value)


def index(text: str) -> str:
    """docs/index.md with today's lists of methods and of preference losses."""
    for heading, names, pages in (("## Methods", METHODS, IDEAS), ("## Preference losses", LOSSES, PREFERENCES)):
        lines = "\n".join(f"- [{pages.get(name, (name,))[0]}](methods/{name}.md)" for name in names)
        text = re.sub(rf"({heading}\n(?:\n[^-\n#].*\n)?\n)(?:- \[.*\n)+", lambda m, lines=lines: f"{m[1]}{lines}\n", text)
    return text


def write_pages() -> None:
    """docs/methods/*.md, and their list in docs/index.md."""
    page_of_all = DOCS / "index.md"
    page_of_all.write_text(index(page_of_all.read_text()))
    (DOCS / "methods").mkdir(exist_ok=True)
    (DOCS / "methods" / "table.md").write_text(table())
    for name in LOSSES:
        (DOCS / "methods" / f"{name}.md").write_text(preference_page(name))
    for name in METHODS:
        (DOCS / "methods" / f"{name}.md").write_text(page(name))


# completions have eight tokens here
SHORT = {"preset": "vapo", "psi": {"part": "whitened", "psi": {"part": "length_gae", "alpha": 2.5}}, "name": "vapo"}


def measure(model: str, data: str, runs: str) -> None:
    """One run per preset, and the pictures."""
    import psigrad

    for name in METHODS:
        if _measured(Path(runs) / name):
            continue
        psigrad.train(
            name,
            model=model,
            dataset=f"{data}/prompts.jsonl",
            eval_dataset=f"{data}/held_out.jsonl",
            reward="reasoning_gym",
            metric="exact",
            output_dir=f"{runs}/{name}",
            max_steps=200,
            learning_rate=3e-4,
            adam_beta2=0.99,
            warmup_steps=5,
            prompts_per_step=16,
            num_generations=8,
            max_completion_length=12,
            **({"reference": f"{runs}/opo/model"} if name == "distill" else {}),
            **({"critic_warmup_steps": 20} if name in ("vc_ppo", "vapo") else {}),
            **({"algorithm": SHORT} if name == "vapo" else {}),
            eval_prompts=400,
            eval_steps=20,
            report=False,
            progress=False,
        )
    draw(runs)


def _measured(folder: Path, steps: int = 200) -> bool:
    """Whether a run has come to its end."""
    return (folder / "metrics.jsonl").exists() and _accuracy(folder)[0][-1:] == [steps]


def draw(runs: str) -> None:
    """docs/images/<preset>.png: this method's held-out accuracy over the others'."""
    (DOCS / "images").mkdir(exist_ok=True)
    curves = {name: _accuracy(Path(runs) / name) for name in METHODS}
    for name in METHODS:
        _picture(name, f"{IDEAS[name][0]}: held-out accuracy over steps", curves)


def _picture(name: str, title: str, curves: dict[str, tuple[list[float], ...]]) -> None:
    """One method's curve with its interval over the others'."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for other, (steps, means, _, _) in curves.items():
        if other != name:
            axes.plot(steps, means, color="#8a8f98", linewidth=0.7, alpha=0.7)
    steps, means, lows, highs = curves[name]
    axes.fill_between(steps, lows, highs, color="#0072B2", alpha=0.18, linewidth=0)
    axes.plot(steps, means, color="#0072B2", linewidth=2.2)
    axes.set_title(title, loc="left", fontsize=9, color="#222222")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#8a8f98", alpha=0.25, linewidth=0.6)
    axes.tick_params(colors="#333333", labelsize=7, length=0)
    axes.set_ylim(0, 1)
    axes.margins(x=0.02)
    figure.savefig(DOCS / "images" / f"{name}.png", dpi=120)


def _accuracy(folder: Path) -> tuple[list[float], ...]:
    """Steps, means, lows and highs of the held-out accuracy of one run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metric = "eval/exact" if any("eval/exact/mean" in row for row in rows) else "eval/similarity"
    rows = [row for row in rows if f"{metric}/mean" in row]
    keys = ("step", f"{metric}/mean", f"{metric}/low", f"{metric}/high")
    return tuple([row[key] for row in rows] for key in keys)


if __name__ == "__main__":
    if sys.argv[1:] == ["pages"]:
        write_pages()
    elif len(sys.argv) == 5 and sys.argv[1] == "curves":
        measure(*sys.argv[2:])
    elif len(sys.argv) == 5 and sys.argv[1] == "preferences":
        measure_preferences(*sys.argv[2:])
    else:
        sys.exit(__doc__)
