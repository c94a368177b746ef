# %% [markdown]
# # 6 · PPO against RLOO
#
# PPO for text keeps four models in memory: a policy, a frozen reference, a reward model *and a critic*. RLOO needs no
# critic, but several completions per prompt. Which is better?

# %%
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import psigrad
from psigrad.objective import Batch, terminal
from psigrad.objective.catalog import GRPO, PPO, RLOO
from psigrad.objective.parts.advantage import gae, leave_one_out, whitened
from psigrad.objective.parts.ratio import KL
from psigrad_extras import words
from psigrad_extras.preflight.plan.memory import by_weights

# %% tags=["parameters"]
sft_steps = 300
rl_steps = 50
seeds = 2

# %% [markdown]
# ## The reward, with a KL penalty
#
# PPO and RLOO maximise the completion's score minus a penalty for moving away from the reference,
#
#     E[ r(x, y) − β·log( π(y|x) / π_ref(y|x) ) ].
#
# The log-ratio is a sum over tokens, so each token gets its own penalty. The last token also gets r. Here are three
# completions:

# %%
mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
logp = torch.tensor(
    [[-1.0, -0.5, -2.0, -0.1], [-0.2, -0.9, -0.4, 0], [-3.0, -0.1, -0.3, -0.6]]
)
logp_ref = logp - torch.tensor(
    [[0.3, 0.0, 0.5, 0.0], [0.0, 0.1, 0.0, 0.0], [1.0, 0.0, 0.0, 0.2]]
)
beta = 0.1
score = torch.tensor([1.0, 0.0, 0.5])
reward = terminal(score, mask) - beta * (logp - logp_ref)
batch = Batch(
    mask=mask,
    reward=reward,
    logp_old=logp,
    logp_ref=logp_ref,
    group=torch.zeros(3, dtype=torch.long),
    value=torch.full((3, 4), 0.4),
    last_value=torch.zeros(3),
)
print("rewards", [[round(x, 2) for x in row] for row in batch.reward.tolist()])
print("sums   ", [round(x, 2) for x in batch.sequence_reward.tolist()])

# %% [markdown]
# ## Two ways to estimate the expected reward
#
# - **PPO** has a critic, which predicts the return at each token. GAE (chapter 3) gives *each token* its own advantage.
# - **RLOO** subtracts the mean reward of the prompt's *other* completions. *All tokens* of a completion get the same
#   advantage.

# %%
by_critic, by_others = gae(1.0, 1.0)(batch), leave_one_out(batch)
fig, axes = plt.subplots(1, 2, figsize=(7.2, 2.4))
for ax, title, advantage in zip(
    axes,
    ("PPO: GAE with V = 0.4", "RLOO: less the others"),
    (by_critic, by_others),
    strict=True,
):
    shown = np.where(mask, advantage, np.nan)
    image = ax.imshow(shown, cmap="RdBu", vmin=-0.8, vmax=0.8)
    for (row, column), value in np.ndenumerate(shown):
        if np.isfinite(value):
            ax.text(column, row, f"{value:+.2f}", ha="center", va="center")
    ax.set(title=title, xlabel="token", ylabel="completion", xticks=[], yticks=[])
plt.show()
R = batch.sequence_reward
print("by hand:", [round(float(R[i] - (R.sum() - R[i]) / 2), 2) for i in range(3)])

# %% [markdown]
# ## What the critic costs
#
# A critic is as large as the policy, and has as much optimiser state. This is the memory with a critic (left) and without
# (right), for models of 8 billion parameters:

# %%
with_critic, without = by_weights(8e9, critic=True), by_weights(8e9, critic=False)
for name, size in with_critic.items():
    print(f"{name:12} {size / 1e9:6.0f} GB   {without.get(name, 0) / 1e9:6.0f} GB")
total = sum(with_critic.values()), sum(without.values())
print(f"{'together':12} {total[0] / 1e9:6.0f} GB   {total[1] / 1e9:6.0f} GB")

# %% [markdown]
# `psigrad plan ppo` predicts the memory for your model.

# %% [markdown]
# ## Now on a language model
#
# The task and the SFT model are those of chapter 4: spell a word backwards, after imitating careless teachers. PPO makes
# four passes over each batch, and RLOO makes one.

# %%
folder = Path(tempfile.mkdtemp())
held_out, prompts = words.rows()
sft = words.imitate(prompts, folder, sft_steps)


# %%
def learn(name, method, seed, **others):
    return psigrad.train(
        method,
        model=sft.model,
        dataset=prompts,
        eval_dataset=held_out,
        reward="exact",
        max_steps=rl_steps,
        eval_steps=10,
        eval_prompts=len(held_out),
        prompts_per_step=16,
        num_generations=8,
        learning_rate=5e-4,
        warmup_steps=5,
        max_completion_length=7,
        seed=seed,
        output_dir=str(folder / f"{name}-{seed}"),
        **words.SETTINGS,
        **others,
    )


def curve(run, key, file="metrics.jsonl"):
    lines = (run.folder / file).read_text().splitlines()
    points = [(row["step"], row[key]) for row in map(json.loads, lines) if key in row]
    return np.array(points).T


def ppo(lam):
    return replace(PPO, psi=whitened(gae(1.0, lam)), kl=None)


arms = {
    "RLOO": (replace(RLOO, kl=None), 1),
    "PPO, λ = 1": (ppo(1.0), 4),
    "PPO, λ = 0.5": (ppo(0.5), 4),
}
runs = {
    name: [
        learn(name[-3:], method, seed, num_iterations=passes) for seed in range(seeds)
    ]
    for name, (method, passes) in arms.items()
}

fig, axes = plt.subplots(1, 2, figsize=(7.2, 3.2), width_ratios=(3, 2))
accuracy, seconds = {}, {}
for name, found in runs.items():
    values = np.array([curve(run, "eval/exact/mean")[1] for run in found])
    axes[0].plot(curve(found[0], "eval/exact/mean")[0], values.mean(0), label=name)
    accuracy[name] = values.mean(0)
    times = [curve(run, "step_time", "timings.jsonl")[1] for run in found]
    seconds[name] = np.median(np.concatenate(times))
axes[0].set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
axes[0].legend()
axes[1].barh(list(seconds), [seconds[name] / seconds["RLOO"] for name in seconds])
axes[1].invert_yaxis()
axes[1].set(title="time of a step, RLOO = 1")
plt.show()
for name, values in accuracy.items():
    print(f"{name:13} at the end {values[-1]:.2f}")

# %% [markdown]
# - PPO learns more from the same number of samples, but takes four times as many optimiser steps. With one pass PPO does
#   not differ measurably from RLOO ([claims](../claims.md)).
# - PPO is a little worse with λ = 0.5, where the early tokens depend mostly on the critic.
# - RLOO has neither λ nor a critic's learning rate to tune.
#
# ## Where it fails
#
# - RLOO needs several completions of the *same* prompt. A dialogue with a person has only one.
# - RLOO gives a wrong step the same advantage as the right steps before it.
# - PPO needs a critic that predicts well. How well does it predict here?

# %%
steps, explained = curve(runs["PPO, λ = 1"][0], "explained_variance")
fig, ax = plt.subplots(figsize=(7.2, 2.4))
ax.plot(steps, np.clip(explained, -1, 1))
ax.axhline(0, color="black", lw=1, ls=":")
ax.set(xlabel="step", ylabel="explained variance", ylim=(-1, 1))
plt.show()
print(f"mean over the second half: {np.mean(explained[len(explained) // 2 :]):.2f}")

# %% [markdown]
# An explained variance of 1 means that the critic predicts each return, and 0 that it is no better than a constant. This
# critic is hardly better: it learns from only a few thousand completions, while the policy changes.
#
# Ahmadian et al. (2024) found RLOO better on models of billions of parameters. Two seeds of a small task cannot decide
# this.
#
# ## The derivation: the KL penalty, token by token
#
# A completion's probability is a product, so the KL is a sum:
#
#     KL(π ‖ π_ref) = E[ Σ_t log( π(y_t|x, y_<t) / π_ref(y_t|x, y_<t) ) ].
#
# PPO credits a token with the return *from this token on*, and RLOO with the total. For λ = 1 and without the clip, both
# gradients have the same mean.
#
# RLOO's baseline is the mean of K − 1 other returns, so its advantage has the variance
#
#     Var(R_i − b_i) = Var(R)·K/(K − 1).
#
# With an exact critic it would be Var(R) at most.
#
# ## In pseudocode
#
# ```text
# RLOO                                        PPO for text
# draw K completions of each prompt           draw one completion of each prompt
# R_i ← r(x,y_i) − β Σ_t log-ratio_t          r_t ← −β log-ratio_t, and r(x,y) at the last t
# Ψ_i ← R_i − mean of the other R_j           Â_t, G_t ← GAE with the critic V
# one step along Σ_i Σ_t ∇log π(y_it) Ψ_i     for a few epochs: clip for π, (V − G)² for V
# ```
#
# ## Read on
#
# - Ziegler and others 2019, *Fine-tuning language models from human preferences*, arXiv:1909.08593.
# - Ahmadian and others 2024, *Back to basics: RLOO*, arXiv:2402.14740.
# - Yuan and others 2025, *VC-PPO*, arXiv:2503.01491.
#
# ## Exercises
#
# 1. Show on the three completions that `leave_one_out` is K/(K − 1) times (the reward minus the mean of all).
# 2. Where does the KL go for PPO, and where for GRPO?
# 3. With a fixed number of completions, larger groups mean fewer prompts. What is lost as K grows?

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# R_i − (ΣR − R_i)/(K − 1) = (K·R_i − ΣR)/(K − 1) = K/(K − 1)·(R_i − mean).
same = torch.allclose(by_others[:, 0], 3 / 2 * (R - R.mean()))
print(same)

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# PPO subtracts the KL from the rewards, before the advantages are computed. GRPO adds it to the
# loss, with the estimator k3.
print(PPO.kl == KL("reward", "k1", 0.05), GRPO.kl == KL("loss", "k3", 0.04))

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# One part of the variance, between prompts, falls with the number of prompts. The other, within
# prompts, falls with the number of completions, and K changes it only by the factor K/(K − 1).
# So many prompts and a small K have the least variance.
between, within, budget = 1.0, 1.0, 128
for k in (2, 4, 8, 16, 64):
    variance = between / (budget / k) + within * k / (k - 1) / budget
    print(f"K = {k:2}: {budget // k:2} prompts, variance {variance:.3f}")
