# %% [markdown]
# # 5 · A reward model, and pushing it too far
#
# Often no program can compute the reward, but people can compare two answers. A **reward model** turns such comparisons
# into a number to maximise. The number is reliable only for answers like those compared.

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
# Suppose that each answer has a worth r. In the Bradley–Terry model, answer w beats answer l with probability
#
#     P(w beats l) = σ(r_w − r_l),    σ(z) = 1 / (1 + e^−z).
#
# To learn r, minimise −log σ(r_w − r_l) over the comparisons. Here are six answers of known worth, with comparisons drawn
# from this formula:

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
# Adding 5 to all worths changes no comparison, so the plot subtracts the means. **Only differences of rewards mean
# anything.**
#
# ## Goodhart's law, by arithmetic
#
# The learned reward, the *proxy*, is the true reward plus an error. Of n answers keep the one with the largest proxy.
# Does its true reward rise with n too?

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
# With small errors, a larger n helps. With some large errors, the best of many answers is the one with the *largest
# error*.

# %% [markdown]
# ## Now on a language model
#
# The task and the SFT model are those of chapter 4: spell a word backwards, after imitating careless teachers. The true
# reward is the similarity to the right answer.

# %%
folder = Path(tempfile.mkdtemp())
held_out, prompts = words.rows()
sft = words.imitate(prompts, folder, sft_steps)

# %% [markdown]
# Judges prefer the more similar of two answers with probability σ(8·difference in similarity). All answers that they
# compare have four letters. The reward model is the SFT model with one number as output.


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
# RLOO maximises the reward model's score, without and with a **KL penalty**, which keeps the policy near the SFT model
# π_ref:
#
#     maximise E[ r(x, y) − β·log( π(y|x) / π_ref(y|x) ) ].


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
# Without the penalty the proxy rises within ten steps, and the true reward falls to almost nothing. With β = 0.5 the
# policy hardly changes. What do both policies write in the end?

# %%
for name, run in runs.items():
    found = [json.loads(line) for line in (run.folder / "rollouts.jsonl").open()][-4:]
    print(name, [row["completion"] for row in found])

# %% [markdown]
# Without the penalty the policy writes nothing! The judges never compared an empty answer. The reward model scores it
# higher than the answers of the SFT model.
#
# ## Where it fails
#
# - The policy moves to answers *unlike those compared*, where the errors are largest.
# - The KL penalty does not correct the reward. With a large β nothing is learned, and with a small β the true reward is
#   lost. To choose β you need people who judge the policy's answers.
# - If a program can check the answer, use that. Read answers even then: a program can be exploited too.
#
# ## The derivation: the loss, its gradient, and the price of KL
#
# The loss is the negative log-likelihood of the comparisons. A pair has the gradient
#
#     ∇loss = −(1 − σ(r_w − r_l))·(∇r_w − ∇r_l).
#
# A pair's weight is the probability that the model gives to the wrong order.
#
# The largest of n normal errors with standard deviation s is about s·√(2·log n). Best-of-n has a KL of log n − (n − 1)/n.
# So the error of the chosen answer is at most about
#
#     s·√(2·KL).
#
# With heavy tails the error grows faster, and the true reward falls back to that of a single draw.
#
# ## In pseudocode
#
# ```text
# for each batch of (x, w, l)
#     one step of Adam on −mean log σ(r(x,w) − r(x,l))
# repeat
#     R_i ← r(x, y_i) − β log(π(y_i|x)/π_ref(y_i|x)) for samples y_1 … y_K
#     one step along Σ_i ∇log π(y_i|x) (R_i − mean of the others)
#     sometimes measure the truth on held-out prompts
# ```
#
# ## Read on
#
# - Bradley and Terry 1952, *Rank analysis of incomplete block designs*, Biometrika 39.
# - Gao and others 2023, *Scaling laws for reward model overoptimization*, arXiv:2210.10760.
# - Kwa and others 2024, *Catastrophic Goodhart*, arXiv:2407.14503.
#
# ## Exercises
#
# 1. What happens to the Bradley–Terry loss if you add 5 to all rewards, or double them?
# 2. The KL of best-of-n is at most log n − (n − 1)/n. Compare best-of-1,024 with the policy that was trained without a
#    penalty.
# 3. Label smoothing assumes that a share ε of labels is wrong. Which difference r_w − r_l then has the least loss?

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# A constant changes nothing. Doubling lowers the loss of pairs in the right order and raises
# that of the others: the scale expresses how sure the model is.
for change in (lambda r: r, lambda r: r + 5, lambda r: 2 * r):
    r = change(learned)
    print(f"{BradleyTerry().loss(r[chosen], r[rejected], None, comparisons).value:.4f}")

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# Best-of-1,024 has a KL of about six nats. The trained policy has a larger one.
print(f"best-of-1,024: {np.log(1024) - 1023 / 1024:.1f} nats")
print(f"RLOO, β = 0: {runs['β = 0'].history.series('eval/kl')[1][-1]:.1f} nats")

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# −(1 − ε)·log σ(d) − ε·log σ(−d) is least where σ(d) = 1 − ε, so d = log((1 − ε) / ε).
lead = torch.linspace(0, 6, 601)
smooth = BradleyTerry(label_smoothing=0.1)
losses = [float(smooth.loss(d[None], torch.zeros(1), None, 1).value) for d in lead]
at = float(lead[int(np.argmin(losses))])
print(f"least at a lead of {at:.2f}; log(0.9 / 0.1) = {np.log(9):.2f}")
