# %% [markdown]
# # 7 · GRPO to DAPO, and their biases
#
# GRPO is RLOO with PPO's clip and three small changes: it divides by a standard deviation and by the length, and its
# baseline is the mean of the whole group. Dr. GRPO and DAPO each drop or replace some of these changes.

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import binom

import psigrad
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, terminal
from psigrad.objective.parts import ratio
from psigrad.objective.parts.advantage import group_mean, leave_one_out
from psigrad.objective.parts.aggregate import fixed_length, sequence_mean, token_mean
from psigrad.objective.parts.surrogate import score

# %% tags=["parameters"]
completions = 20_000
sft_steps = 300
rl_steps = 40

# %% [markdown]
# ## What GRPO computes
#
# Each prompt gets G completions with rewards R_i. Every token of completion i has the advantage
#
#     A_i = ( R_i − mean(R) ) / std(R).
#
# The loss clips each token as in PPO, and averages over each completion's tokens:
#
#     loss = −(1/G)·Σ_i (1/|y_i|)·Σ_t min( ρ_t·A_i, clip(ρ_t, 1 − ε, 1 + ε)·A_i ) + β·KL.
#
# In psigrad each method is a choice of parts:

# %%
from psigrad.objective.catalog import DAPO, DR_GRPO, GRPO
from psigrad_extras import words

for method in (GRPO, DR_GRPO, DAPO):
    print(method.name)
    for part in ("psi", "surrogate", "aggregate", "kl"):
        value = getattr(method, part)
        print(f"   {part:10} {getattr(value, '__name__', value)}")
    print(f"   keep       {[part.__name__ for part in method.keep]}")


# %% [markdown]
# ## Dividing by the standard deviation: the difficulty bias
#
# Let rewards be 0 or 1, and p the chance that the model solves a prompt. The plot shows how strongly groups of 8 pull the
# model towards right answers:


# %%
def pull(psi, size=8):
    """E of the advantage of right completions, times their share, over p."""
    found = []
    for right in range(size + 1):
        reward = (torch.arange(size) < right).float()[:, None]
        ones, group = torch.ones_like(reward), torch.zeros(size, dtype=torch.long)
        batch = Batch(mask=ones.bool(), reward=reward, logp_old=-ones, group=group)
        found.append(float((psi(batch) * reward).sum()) / size)
    chance = np.linspace(0.01, 0.99, 99)
    return chance, binom.pmf(np.arange(size + 1), size, chance[:, None]) @ np.array(
        found
    )


fig, ax = plt.subplots()
pulls = {}
for name, psi in {
    "RLOO": leave_one_out,
    "Dr. GRPO: R − mean": group_mean(std=False),
    "GRPO: (R − mean) / std": group_mean(),
}.items():
    chance, pulls[name] = pull(psi)
    ax.plot(chance, pulls[name], label=name)
ax.set(xlabel="p, the chance of a right answer", ylabel="pull towards right answers")
ax.legend()
plt.show()
exact = chance * (1 - chance)
print(f"RLOO against p·(1 − p): {np.abs(pulls['RLOO'] - exact).max():.0e}")
print(
    f"Dr. GRPO is {np.mean(pulls['Dr. GRPO: R − mean'] / exact):.4f} of it: 7/8 = 0.875"
)
hard = pulls["GRPO: (R − mean) / std"] / exact
print(
    f"GRPO weighs a prompt of p = 0.05 {hard[4] / hard[49]:.1f} times as much as one of p = 0.5"
)

# %% [markdown]
# RLOO follows the gradient of accuracy, in proportion to p·(1 − p). GRPO gives very hard and very easy prompts more
# weight.
#
# ## Dividing by the length: the length bias
#
# In a wrong completion of 10 tokens, each token gets 1/10 of the blame, and in one of 100 tokens 1/100. Suppose that a
# model is right in 30 % of the cases, *whatever the length*. Then the loss should not change its lengths. Does it?


# %%
def push_on_length(aggregate):
    """How the loss moves the logit of stopping, by right and by wrong completions."""
    torch.manual_seed(0)
    length = 1 + torch.distributions.Geometric(0.1).sample((completions,)).long().clamp(
        max=99
    )
    right = torch.rand(completions) < 0.3
    mask = torch.arange(100) < length[:, None]
    last = torch.arange(100) == length[:, None] - 1
    stop = torch.tensor(-2.2, requires_grad=True)
    logp = torch.where(last, 1.0, -1.0) * stop
    logp = torch.nn.functional.logsigmoid(logp)
    batch = Batch(
        mask=mask,
        reward=terminal(right.float(), mask),
        logp_old=logp,
        group=torch.zeros(completions, dtype=torch.long),
    )
    method = PolicyGradient(group_mean(std=False), ratio.none, score, aggregate)
    prepared, pushes = method.prepare(batch, {}), {}
    for name, rows in (("right", right), ("wrong", ~right)):
        outputs, part = PolicyOutputs(logp[rows]), prepared.select(rows)
        loss = method.loss(part, outputs, method.totals(prepared), {}).value
        (gradient,) = torch.autograd.grad(loss, stop, retain_graph=True)
        pushes[name] = -float(gradient)
    return pushes


rules = {
    "GRPO: 1/|y|": sequence_mean,
    "Dr. GRPO: 1/L": fixed_length(10),
    "DAPO: tokens": token_mean,
}
pushed = {name: push_on_length(rule) for name, rule in rules.items()}
fig, ax = plt.subplots()
place = np.arange(3)
ax.bar(
    place - 0.2,
    [found["right"] for found in pushed.values()],
    0.4,
    label="right answers",
)
ax.bar(
    place + 0.2,
    [found["wrong"] for found in pushed.values()],
    0.4,
    label="wrong answers",
)
ax.axhline(0, color="black", lw=1)
ax.set_xticks(place, list(pushed))
ax.set(
    ylabel="push towards stopping", title="Length has nothing to do with being right"
)
ax.legend()
plt.show()
for name, found in pushed.items():
    print(f"{name:14} right {found['right']:+.3f}   wrong {found['wrong']:+.3f}")

# %% [markdown]
# With Dr. GRPO's constant and DAPO's mean over all tokens, both pushes are about 0. With GRPO's 1/|y|, right answers are
# pushed to be shorter, and wrong ones *longer*.
#
# Here the two pushes cancel. A language model can separate them, and write ever longer wrong answers.
#
# ## Groups without signal, and an asymmetric clip
#
# If all rewards of a group are equal, its advantages are 0. Another limit is PPO's clip: a token of probability 0.01 gets
# no gradient once it exceeds 0.012. So rare tokens hardly rise.

# %%
fig, axes = plt.subplots(1, 2)
for size in (4, 8, 16):
    axes[0].plot(chance, chance**size + (1 - chance) ** size, label=f"G = {size}")
axes[0].set(xlabel="p", title="share of groups without signal")
axes[0].legend()
old = np.linspace(0.001, 0.9, 200)
for high in (0.2, 0.28):
    axes[1].plot(old, np.minimum(old * (1 + high), 1) - old, label=f"ε_high = {high}")
axes[1].set(xlabel="probability before", title="how far it may rise in one batch")
axes[1].legend()
plt.show()

# %% [markdown]
# DAPO's **dynamic sampling** draws prompts until the batch is full of groups with signal. Its **clip-higher** (ε_high =
# 0.28) lets rare tokens rise further. DAPO has no KL term.

# %% [markdown]
# ## Now on a language model
#
# The task and the SFT model are those of chapter 4: spell a word backwards, after imitating careless teachers.

# %%
folder = Path(tempfile.mkdtemp())
held_out, prompts = words.rows()
sft = words.imitate(prompts, folder, sft_steps)


# %%
def learn(method):
    return psigrad.train(
        method,
        model=sft.model,
        dataset=prompts,
        eval_dataset=held_out,
        reward="exact",
        max_steps=rl_steps,
        eval_steps=5,
        eval_prompts=len(held_out),
        prompts_per_step=16,
        num_generations=8,
        learning_rate=5e-4,
        warmup_steps=5,
        max_completion_length=7,
        output_dir=str(folder / method.name),
        **words.SETTINGS,
    )


runs = {
    "GRPO": learn(replace(GRPO, kl=None)),
    "Dr. GRPO": learn(replace(DR_GRPO, aggregate=fixed_length(7))),
    "DAPO": learn(DAPO),
}
fig, axes = plt.subplots(1, 3, figsize=(9, 3))
samples = {}
for name, run in runs.items():
    axes[0].plot(*run.history.series("eval/exact/mean"), label=name)
    axes[1].plot(*run.history.series("frac_reward_zero_std"), label=name)
    step, drawn = run.history.series("samples")
    samples[name] = np.cumsum(drawn)
    axes[2].plot(step, samples[name], label=name)
axes[0].set(title="held-out accuracy", xlabel="update")
axes[1].set(title="groups without signal", xlabel="update")
axes[2].set(title="completions drawn", xlabel="update")
axes[0].legend()
plt.show()
for name, run in runs.items():
    accuracy = run.history.series("eval/exact/mean")[1]
    print(
        f"{name:9} accuracy {accuracy[-1]:.2f} after {int(samples[name][-1]):5} completions"
    )

# %% [markdown]
# About a fifth of GRPO's groups have no signal. DAPO replaces them, which takes more completions. One run of each method
# cannot rank them: [claims](../claims.md) compares them over several seeds.
#
# ## Where it fails
#
# - No method here can tell which token was the mistake.
# - A prompt that is never solved teaches nothing. Start with SFT or with easier prompts.
# - All answers of this task have the same length, so the length bias cannot appear.
#
# ## The derivation: what the three changes do
#
# A large group has the mean p and the standard deviation √(p·(1 − p)). Without the division a method follows the gradient
# of accuracy, Σ_x ∇p(x). With the division it follows
#
#     Σ_x ∇p(x) / √(p(x)·(1 − p(x))) = ∇ Σ_x 2·arcsin √p(x).
#
# This function of p is steep at both ends, which is the difficulty bias.
#
# GRPO gives a token the weight A/|y|, so short completions weigh more per token. The push towards stopping, E[A/|y|·∇log
# π(stop)], therefore has the sign of A.
#
# The group's mean contains R_i itself: R_i − mean(R) = (1 − 1/G)·(R_i − mean of the others).
#
# ## In pseudocode
#
# ```text
# repeat
#     draw G completions y_i of each prompt; rewards R_i      (DAPO: draw again if equal)
#     A_i ← R_i − mean(R)                                     (GRPO, DAPO: divided by std(R))
#     for each minibatch
#         ρ_t ← π(y_t) / π_old(y_t)
#         l_t ← −min(ρ_t A_i, clip(ρ_t, 1 − ε, 1 + ε_high) A_i)
#         GRPO:      mean over t, then over i;  + β KL
#         Dr. GRPO:  sum, divided by a constant
#         DAPO:      mean over all tokens of the batch
# ```
#
# ## Read on
#
# - Shao and others 2024, *DeepSeekMath: GRPO*, arXiv:2402.03300.
# - Liu and others 2025, *Understanding R1-Zero-like training: Dr. GRPO*, arXiv:2503.20783.
# - Yu and others 2025, *DAPO*, arXiv:2503.14476.
#
# ## Exercises
#
# 1. What are GRPO's and RLOO's advantages for G = 2 and rewards 0 and 1?
# 2. At which p is a group of 8 without signal half of the time?
# 3. Write GRPO without its two biases as a variant, with `dataclasses.replace`.

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# GRPO: ±0.5/0.707 = ±0.707, with the sample standard deviation. RLOO: ±1. Only the size
# differs, and for G = 2 the learning rate can compensate for it.
two = Batch(
    mask=torch.ones(2, 1, dtype=torch.bool),
    reward=torch.tensor([[1.0], [0.0]]),
    logp_old=torch.zeros(2, 1),
    group=torch.zeros(2, dtype=torch.long),
)
print(group_mean()(two).flatten().tolist(), leave_one_out(two).flatten().tolist())

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# p⁸ + (1 − p)⁸ = ½ at p ≈ 0.08, and at 0.92. A model that is right nine times in ten wastes
# almost half of its groups.
silent = chance**8 + (1 - chance) ** 8
print(f"p = {chance[np.argmin(np.abs(silent[:50] - 0.5))]:.2f}")

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# This variant is `DR_GRPO`.
mine = replace(
    GRPO,
    psi=group_mean(std=False),
    aggregate=fixed_length(1024),
    kl=None,
    name="dr_grpo",
)
print(mine == DR_GRPO)
