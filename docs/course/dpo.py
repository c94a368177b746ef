# %% [markdown]
# # 8 · DPO: preferences without a reward model
#
# Chapter 5 learned a reward model from comparisons, and then maximised it with a KL penalty. The best policy for a reward
# has a closed form. Rafailov et al. (2023) turn this form into a loss on pairs, without a reward model and without
# sampling.

# %%
import itertools
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import psigrad
from psigrad.language.data import tasks
from psigrad.objective.catalog import RLOO
from psigrad.objective.preferences.preference_catalog import DPO, IPO
from psigrad.objective.preferences.preference_loss import Pairs
from psigrad_extras import words

# %% tags=["parameters"]
sft_steps = 300
dpo_steps = 120
rl_steps = 60
solve_steps = 2000

# %% [markdown]
# ## The best policy, in closed form
#
# We maximise E_π[r(y)] − β·KL(π ‖ π_ref). The solution is
#
#     π*(y) = π_ref(y)·exp( r(y) / β ) / Z.
#
# Gradient ascent on the objective finds the same policy:

# %%
reference = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05])
reward = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0])
beta = 0.8

theta = reference.log().clone().requires_grad_()
for _ in range(solve_steps):
    logp = theta.log_softmax(0)
    objective = logp.exp() @ reward - beta * (logp.exp() @ (logp - reference.log()))
    (gradient,) = torch.autograd.grad(objective, theta)
    theta = (theta + 0.5 * gradient).detach().requires_grad_()
climbed = theta.softmax(0).detach()
closed = reference * (reward / beta).exp()
closed = closed / closed.sum()
print("climbed    ", [round(p, 4) for p in climbed.tolist()])
print("closed form", [round(p, 4) for p in closed.tolist()])

# %% [markdown]
# Solve for r: r(y) = β·log( π*(y) / π_ref(y) ) + β·log Z. In the Bradley–Terry loss (chapter 5) only differences of
# rewards count, so Z cancels:
#
#     loss = −log σ( β·[ log π(w)/π_ref(w) − log π(l)/π_ref(l) ] ).
#
# **The policy is its own reward model.** Now learn π from comparisons alone, without r:

# %%
first, second = torch.tensor(list(itertools.permutations(range(5), 2))).T
wins = torch.sigmoid(reward[first] - reward[second])  # how often first beats second
one = torch.ones(20, dtype=torch.long)
method = replace(DPO, beta=beta)
theta = reference.log().clone().requires_grad_()
for _ in range(solve_steps):
    logp, ref = theta.log_softmax(0), reference.log()
    pairs = Pairs(logp[first], logp[second], one, one, ref[first], ref[second])
    better, worse = method.rewards(pairs)
    loss = (wins * method.link(better, worse, beta)).sum() / wins.sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    theta = (theta - 4.0 * gradient).detach().requires_grad_()
by_dpo = theta.softmax(0).detach()

fig, ax = plt.subplots()
place = np.arange(5)
for shift, name, values in (
    (-0.25, "reference", reference),
    (0.0, "closed form, with r", closed),
    (0.25, "DPO, comparisons only", by_dpo),
):
    ax.bar(place + shift, values, 0.25, label=name)
ax.set(xlabel="answer", ylabel="probability")
ax.legend()
plt.show()
print(f"largest difference {(by_dpo - closed).abs().max():.1e}")

# %% [markdown]
# The result is the same policy. This takes comparisons of *all* answers, and a policy that can represent any
# distribution. With a language model we have neither.

# %% [markdown]
# ## Now on a language model
#
# The task and the SFT model are those of chapter 4: spell a word backwards, after imitating careless teachers. For each
# word the judge prefers the right answer to a wrong one. We train with DPO, and with IPO, which aims at a fixed margin.

# %%
folder = Path(tempfile.mkdtemp())
held_out, prompts = words.rows()
sft = words.imitate(prompts, folder, sft_steps)


# %%
def compared(rows, seed):
    rng, pairs = random.Random(seed), []
    for row in rows:
        right, wrong = row["answer"], tasks.swap_ending(row["answer"], rng)
        if wrong == right or rng.random() < 0.3:
            wrong = "".join(
                rng.choice("abcdefgh") if k in (0, 2) else c
                for k, c in enumerate(right)
            )
        if wrong != right:
            pairs.append(
                {
                    "prompt": row["prompt"],
                    "chosen": f" {right}",
                    "rejected": f" {wrong}",
                }
            )
    return pairs


def prefer(method):
    return psigrad.train(
        method,
        model=sft.model,
        dataset=compared(prompts, seed=1),
        eval_dataset=compared(held_out, seed=2),
        max_steps=dpo_steps,
        eval_steps=10,
        batch_size=32,
        learning_rate=5e-4,
        warmup_steps=5,
        output_dir=str(folder / method),
        **words.SETTINGS,
    )


runs = {"DPO": prefer("dpo"), "IPO": prefer("ipo")}
fig, axes = plt.subplots(1, 3, figsize=(9, 3))
for name, run in runs.items():
    axes[0].plot(*run.history.series("eval/rewards/margins"), label=name)
    axes[1].plot(*run.history.series("eval/logps/chosen"), label=name)
    axes[2].plot(*run.history.series("eval/logps/rejected"), label=name)
for ax, title in zip(axes, ("margin", "log π(chosen)", "log π(rejected)"), strict=True):
    ax.set(title=title, xlabel="step")
axes[0].legend()
plt.show()
change = {}
for name, run in runs.items():
    chosen = run.history.series("eval/logps/chosen")[1]
    change[name] = chosen[-1] - chosen[0]
    best = run.history.series("eval/rewards/accuracies")[1][-1]
    print(
        f"{name}: {best:.0%} of new pairs in order, log π(chosen) {change[name]:+.2f} nats"
    )

# %% [markdown]
# The margins rise because the rejected answers become improbable. The chosen answers do not become more probable (middle
# plot). The loss depends only on the *difference* of two log-ratios, so both can fall while other answers gain.
#
# Which model answers best? For comparison, RLOO draws as many completions as DPO's pairs contain.

# %%
rloo = psigrad.train(
    replace(RLOO, kl=None),
    model=sft.model,
    dataset=prompts,
    reward="exact",
    max_steps=rl_steps,
    prompts_per_step=16,
    num_generations=8,
    learning_rate=5e-4,
    warmup_steps=5,
    max_completion_length=7,
    output_dir=str(folder / "rloo"),
    **words.SETTINGS,
)
accuracy = {}
for name, run in {"SFT": sft, **runs, "RLOO": rloo}.items():
    figures = psigrad.evaluate(
        model=run.model,
        dataset=held_out,
        reward="exact",
        eval_prompts=len(held_out),
        max_completion_length=7,
        threads=1,
    )
    accuracy[name] = figures["eval/exact/mean"]
fig, ax = plt.subplots(figsize=(7.2, 2.2))
ax.barh(list(accuracy), list(accuracy.values()))
ax.invert_yaxis()
ax.set(xlim=(0, 1), title="held-out accuracy, sampled")
plt.show()
print({name: round(value, 2) for name, value in accuracy.items()})
print(f"completions: DPO {2 * 32 * dpo_steps}, RLOO {128 * rl_steps}")

# %% [markdown]
# ## Where it fails
#
# DPO's pairs are fixed. As the policy changes, they resemble its own answers less and less. Online methods sample new
# answers.
#
# [Claims](../claims.md) repeats this comparison over several seeds. [A table](../methods/table.md) compares all methods.
#
# ## The derivation, in full
#
# Write the objective as one KL. With Z = Σ_y π_ref(y)·exp(r(y)/β),
#
#     E_π[r] − β·KL(π ‖ π_ref) = −β·E_π[ log( π(y) / (π_ref(y)·exp(r(y)/β)) ) ] = β·log Z − β·KL(π ‖ π*).
#
# The first term does not depend on π, and the second is 0 only at π = π*. So π* is the best policy.
#
# With û(y) = β·log(π(y)/π_ref(y)) the gradient of DPO's loss is
#
#     ∇loss = −β·σ(û_l − û_w)·( ∇log π(w) − ∇log π(l) ).
#
# The weight σ(û_l − û_w) is large for pairs that the policy ranks wrongly.
#
# ## In pseudocode
#
# ```text
# π_ref ← a frozen copy of π
# for each batch of (x, w, l)
#     û_w ← β log(π(w|x)/π_ref(w|x));  û_l likewise
#     loss ← −mean log σ(û_w − û_l)                             (IPO: (û_w/β − û_l/β − 1/(2β))²)
#     one step of Adam
# ```
#
# ## Read on
#
# - Rafailov and others 2023, *DPO*, arXiv:2305.18290.
# - Azar and others 2023, *IPO*, arXiv:2310.12036.
# - Pal and others 2024, *Smaug: DPO-Positive*, arXiv:2402.13228.
#
# ## Exercises
#
# 1. At the start π = π_ref. What is DPO's loss, whatever the pairs?
# 2. After training, compare the implicit rewards of the five answers with r.
# 3. The judge *always* prefers the same answer. What do DPO and IPO do?

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# Both log-ratios are 0, so −log σ(0) = log 2.
ref = reference.log()
start = Pairs(ref[first], ref[second], one, one, ref[first], ref[second])
print(f"{method.loss(start, 20, 20).value:.4f}, log 2 = {np.log(2):.4f}")

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# β·log(π/π_ref) equals r up to a constant.
implicit = beta * (by_dpo / reference).log()
print([round(x, 3) for x in (implicit - implicit[0]).tolist()], reward.tolist())

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# DPO's loss then has no minimum: the difference of log-ratios grows without limit, whatever β
# is. IPO's difference stops at 1/(2β).
for loss_of in (replace(DPO, beta=beta), replace(IPO, beta=beta)):
    gap = torch.zeros(1, requires_grad=True)
    for _ in range(solve_steps):
        value = loss_of.link(beta * gap, 0 * gap, beta).sum()
        (gradient,) = torch.autograd.grad(value, gap)
        gap = (gap - 0.2 * gradient).detach().requires_grad_()
    print(
        f"{loss_of.name}: difference of log-ratios {gap.item():.2f}; 1/(2β) = {1 / (2 * beta):.2f}"
    )
