# %% [markdown]
# # 5 · A reward model, and pushing it too far
#
# Often nobody can write a program for the reward: helpful, polite, well written. But people can
# compare: which of two answers is better? A **reward model** turns comparisons into a number, and
# reinforcement learning makes the number large. This chapter does both, and shows the trap: the
# number is not what we wanted. It only agrees with what we wanted on the answers that were
# compared.

# %%
import json
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import psigrad
from psigrad.language.data import tasks
from psigrad.language.rewards.builtin import similarity
from psigrad.objective.preferences.reward_model import BradleyTerry
from psigrad_extras import words

# %% tags=["parameters"]
comparisons = 4000
sft_steps = 300
reward_steps = 60
rl_steps = 120

# %% [markdown]
# ## From comparisons to numbers
#
# Bradley and Terry (1952) model comparisons: each answer has a worth r, and w wins against l with
# probability
#
#     P(w beats l) = σ(r_w − r_l),    σ(z) = 1 / (1 + e^−z).
#
# To learn r, maximise the probability of the observed comparisons: loss = −log σ(r_w − r_l). Here
# are six answers with known worth, and judges who err as the formula says:

# %%
worth = torch.tensor([-1.5, -0.6, 0.0, 0.3, 1.0, 2.0])
generator = torch.Generator().manual_seed(0)
first = torch.randint(6, (comparisons,), generator=generator)
second = (first + torch.randint(1, 6, (comparisons,), generator=generator)) % 6
wins = torch.rand(comparisons, generator=generator) < torch.sigmoid(
    worth[first] - worth[second]
)
chosen, rejected = torch.where(wins, first, second), torch.where(wins, second, first)

learned = torch.zeros(6, requires_grad=True)
for _ in range(300):
    loss = (
        BradleyTerry().loss(learned[chosen], learned[rejected], None, comparisons).value
    )
    (gradient,) = torch.autograd.grad(loss, learned)
    learned = (learned - 4.0 * gradient).detach().requires_grad_()
learned = learned.detach()

fig, ax = plt.subplots(figsize=(4.5, 3.2))
ax.plot([-2, 2], [-2, 2], color="black", lw=1, ls=":")
ax.plot(worth - worth.mean(), learned - learned.mean(), "o")
ax.set(xlabel="true worth, centred", ylabel="learned, centred")
plt.show()
error = ((learned - learned.mean()) - (worth - worth.mean())).abs().max()
print(f"largest error {error:.2f} from {comparisons} comparisons")

# %% [markdown]
# We had to subtract the means of the learned and of the true worths, because adding 5 to all
# worths changes no comparison. **Only differences of rewards mean anything.** (A baseline removes
# constants anyway, chapter 2.)
#
# ## Goodhart's law, by arithmetic
#
# Let the learned reward, the *proxy*, be truth + error. Draw n answers and keep the one with the
# largest proxy. With larger n the proxy rises, by construction. Does the truth rise too?

# %%
rng = np.random.default_rng(0)
sizes = 2 ** np.arange(0, 11)
fig, axes = plt.subplots(1, 2, sharey=True)
kept = {}
for ax, (name, draw) in zip(
    axes,
    {
        "small errors": lambda n: 0.7 * rng.normal(size=(4000, n)),
        "some large errors": lambda n: 0.35 * rng.standard_t(2, size=(4000, n)),
    }.items(),
    strict=True,
):
    proxies, truths = [], []
    for n in sizes:
        truth = rng.normal(size=(4000, n))
        proxy = truth + draw(n)
        best = proxy.argmax(1)[:, None]
        proxies.append(np.take_along_axis(proxy, best, 1).mean())
        truths.append(np.take_along_axis(truth, best, 1).mean())
    kept[name] = truths
    ax.semilogx(sizes, proxies, "--", label="proxy", base=2)
    ax.semilogx(sizes, truths, label="truth", base=2)
    ax.set(title=name, xlabel="n of best-of-n", ylim=(-0.2, 5))
    ax.legend()
plt.show()
peak = int(np.argmax(kept["some large errors"]))
print(f"with some large errors the truth peaks at n = {sizes[peak]} and then falls")

# %% [markdown]
# If errors are small everywhere, more selection still helps, but less and less. If the proxy is
# sometimes far too high, the best of many is no longer the best answer. It is the answer with the
# *greatest error*. Training a policy selects much harder than best-of-1,024.

# %% [markdown]
# ## Now on a language model
#
# The task and the SFT model are those of chapter 4. What we want, the **truth**, is similarity to
# the right answer: 1 − edits / length.

# %%
folder = Path(tempfile.mkdtemp())
held_out, prompts = words.rows()
sft = words.imitate(prompts, folder, sft_steps)

# %% [markdown]
# Judges see two answers, and prefer the better one with probability σ(8·difference in similarity).
# All answers have four letters; the judges never see other lengths. The reward model is the SFT
# model with one number as its output, read at the last token.


# %%
def an_answer(right, rng):
    """The right answer, the teachers' mistake, or one with a letter or more changed."""
    if rng.random() < 0.4:
        return right if rng.random() < 0.5 else tasks.swap_ending(right, rng)
    letters = list(right)
    for place in rng.sample(range(4), rng.randint(1, 3)):
        letters[place] = rng.choice("abcdefgh")
    return "".join(letters)


def compare(rows, seed):
    rng, pairs = random.Random(seed), []
    for row in rows:
        two = [an_answer(row["answer"], rng) for _ in range(2)]
        a, b = similarity(two, [row["answer"]] * 2)
        if two[0] != two[1]:
            if rng.random() > 1 / (1 + np.exp(-8 * (a - b))):
                two.reverse()
            pairs.append(
                {
                    "prompt": row["prompt"],
                    "chosen": f" {two[0]}",
                    "rejected": f" {two[1]}",
                }
            )
    return pairs


pairs = compare(prompts[:1500], seed=1)  # comparisons are expensive
reward_model = psigrad.train(
    "reward",
    model=sft.model,
    dataset=pairs,
    eval_dataset=compare(held_out, seed=2),
    max_steps=reward_steps,
    batch_size=64,
    learning_rate=1e-3,
    output_dir=str(folder / "reward"),
    **words.SETTINGS,
)
accuracy = reward_model.after["eval/accuracy"]
print(f"agrees with the judges on {accuracy:.0%} of new pairs")

# %% [markdown]
# The reward model is not perfect, and neither are the judges. Now maximise its score with RLOO,
# once without a penalty, and once with a **KL penalty**,
#
#     maximise E[ r(x, y) − β·log( π(y|x) / π_ref(y|x) ) ],
#
# that keeps the policy near the SFT model π_ref, whose answers the judges compared. The policy may
# write up to 10 tokens.


# %%
def against_the_model(beta):
    kl = {"where": "reward", "estimator": "k1", "coefficient": beta} if beta else None
    return psigrad.train(
        {"preset": "rloo", "kl": kl},
        model=sft.model,
        dataset=prompts,
        eval_dataset=held_out,
        reward_model=str(reward_model.model),
        metric="similarity",
        max_steps=rl_steps,
        eval_steps=10,
        eval_prompts=len(held_out),
        eval_kl=True,
        prompts_per_step=16,
        num_generations=8,
        learning_rate=2e-3,
        warmup_steps=5,
        max_completion_length=10,
        output_dir=str(folder / f"rloo-{beta}"),
        **words.SETTINGS,
    )


runs = {"β = 0": against_the_model(0.0), "β = 0.5": against_the_model(0.5)}
fig, axes = plt.subplots(1, 3, figsize=(9, 3))
for name, run in runs.items():
    axes[0].plot(*run.history.series("reward"), label=name)
    axes[1].plot(*run.history.series("eval/similarity/mean"), label=name)
    axes[2].plot(*run.history.series("eval/kl"), label=name)
for ax, title in zip(
    axes, ("proxy: the reward model", "truth: similarity", "KL, nats"), strict=True
):
    ax.set(title=title, xlabel="step")
axes[0].legend()
plt.show()
for name, run in runs.items():
    truth = run.history.series("eval/similarity/mean")[1]
    print(
        f"{name:8} truth at the start {truth[0]:.2f}, best {max(truth):.2f}, end {truth[-1]:.2f}"
    )

# %% [markdown]
# Without the penalty the proxy rises sharply within ten steps, and the truth falls to almost nothing.
# With this β the policy hardly changes: the truth neither falls nor rises. What do the two policies write
# in the end?

# %%
for name, run in runs.items():
    found = [json.loads(line) for line in (run.folder / "rollouts.jsonl").open()][-4:]
    print(name, [row["completion"] for row in found])

# %% [markdown]
# Without the penalty the policy writes nothing! The judges compared answers of four letters. No pair ever said that
# an empty answer is bad, and the reward model, learned from few comparisons, happens to score it higher than a right
# one. Train the reward model on all words, with 300 steps at a learning rate of 3e-3, and look again.
#
# ## Where it fails
#
# - A reward model is right *where there were comparisons*. The policy moves to answers without
#   comparisons, since the largest errors are there.
# - The KL penalty does not correct the reward. It limits how far the policy may move to exploit the
#   reward. If β is too large, nothing is learned; if it is too small, the truth is lost. Only a
#   measurement of the truth shows which: people judge some held-out answers.
# - If a program can check the answer, use the program (chapters 4, 6 and 7). Still read the
#   answers: programs have holes too.
#
# `psigrad` prints a warning if the reward rises while the held-out metric falls. The run needs a
# held-out metric for this.
#
# ## The derivation: the loss, its gradient, and the price of KL
#
# The likelihood of all comparisons is a product of σ(r_w − r_l). Its negative logarithm is the loss, and with σ' = σ·(1 − σ)
#
#     ∇loss = −(1 − σ(r_w − r_l))·(∇r_w − ∇r_l):
#
# the weight of a pair is the probability that the model gave to the wrong order. A constant in r
# cancels.
#
# With a KL penalty the best policy has a closed form (chapter 8). How much does it gain? For a proxy with errors that are normal with
# deviation s and independent of the truth, the best of n draws has an error of about s·√(2·log n), and a KL of log n − (n − 1)/n. So the
# proxy exceeds the truth by about
#
#     error ≈ s·√(2·KL),
#
# which is why curves of over-optimisation are drawn over the square root of the KL. With heavy tails the error grows faster, and the
# best of many is in truth no better than a single draw.
#
# ## In pseudocode
#
# ```text
# reward model                                      RL against it
# for each batch of (x, w, l)                       repeat
#     loss ← −mean log σ( r(x,w) − r(x,l) )             draw x, and y_1 … y_K from π(·|x)
#     one step of Adam on it                            R_i ← r(x, y_i) − β log( π(y_i|x) / π_ref(y_i|x) )
#                                                       one step along Σ_i ∇log π(y_i|x) (R_i − mean of the others)
#                                                       now and then: measure the truth on held-out prompts
# ```
#
# ## Read on
#
# - Bradley and Terry 1952, *Rank analysis of incomplete block designs*, Biometrika 39.
# - Christiano and others 2017, *Deep RL from human preferences*, arXiv:1706.03741; Stiennon and others 2020, arXiv:2009.01325.
# - Gao, Schulman and Hilton 2023, *Scaling laws for reward model overoptimization*, arXiv:2210.10760.
# - Kwa, Thomas and Garriga-Alonso 2024, *Catastrophic Goodhart*, arXiv:2407.14503: what heavy tails do to a KL penalty.
#
# ## Exercises
#
# 1. Add 5 to all rewards of a pair: what happens to the Bradley–Terry loss? And if all are doubled?
# 2. Best-of-n has KL(π_n ‖ π) = log n − (n − 1)/n at most. How many nats is best-of-1,024? Compare
#    with the KL of the policy without a penalty.
# 3. Label smoothing ε says that a share of labels is wrong. Show that the loss then has its minimum
#    at a finite difference r_w − r_l. At which?

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# A constant changes nothing. Doubling lowers the loss of right pairs and raises that of wrong ones:
# the scale expresses how sure the model is.
for change in (lambda r: r, lambda r: r + 5, lambda r: 2 * r):
    r = change(learned)
    print(f"{BradleyTerry().loss(r[chosen], r[rejected], None, comparisons).value:.4f}")

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# About six nats. Gradient steps go further, at little cost.
print(f"best-of-1,024: {np.log(1024) - 1023 / 1024:.1f} nats")
print(f"RLOO, β = 0: {runs['β = 0'].history.series('eval/kl')[1][-1]:.1f} nats")

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# −(1 − ε)·log σ(d) − ε·log σ(−d) is least where σ(d) = 1 − ε.
lead = torch.linspace(0, 6, 601)
smooth = BradleyTerry(label_smoothing=0.1)
losses = [float(smooth.loss(d[None], torch.zeros(1), None, 1).value) for d in lead]
at = float(lead[int(np.argmin(losses))])
print(f"least at a lead of {at:.2f}; log(0.9 / 0.1) = {np.log(9):.2f}")
