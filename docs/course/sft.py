# %% [markdown]
# # 4 · Supervised fine-tuning, and what imitation cannot do
#
# A pretrained language model continues text. **Supervised fine-tuning** (SFT) trains it to imitate example answers.

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
from psigrad.language.models import tiny
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs
from psigrad.objective.catalog import GRPO
from psigrad.objective.parts import aggregate, ratio
from psigrad.objective.parts.advantage import ones
from psigrad.objective.parts.surrogate import score

# %% tags=["parameters"]
sft_steps = 600
rl_steps = 60
held_out_words = 300

# %% [markdown]
# ## The loss
#
# SFT raises the probability of each token of an example answer y to a prompt x. Its loss is the **cross-entropy**
#
#     loss = −(1/T)·Σ_t log π(y_t | x, y_<t).
#
# Its gradient is the policy gradient (chapter 2) with Ψ = 1, on actions that somebody else chose. So a `PolicyGradient`
# gives the same loss as torch:

# %%
imitation = PolicyGradient(ones, ratio.none, score, aggregate.token_mean)
logits = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
answer = torch.tensor([[1, 7, 2, 0, 0], [3, 3, 5, 6, 0]])
mask = torch.tensor(
    [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool
)  # lengths 3 and 4

logp = logits.log_softmax(2).gather(2, answer[..., None])[..., 0]
batch = Batch(
    mask=mask, reward=torch.zeros(2, 5), logp_old=logp, group=torch.zeros(2).long()
)
prepared = imitation.prepare(batch, imitation.initial_state())
loss = imitation.loss(
    prepared, PolicyOutputs(logp), imitation.totals(prepared), {}
).value
usual = torch.nn.functional.cross_entropy(logits[mask], answer[mask])
print(f"policy gradient with Ψ = 1: {loss:.6f}    torch's cross-entropy: {usual:.6f}")

# %% [markdown]
# ## What the minimum is
#
# A model imitates three answers, which it is shown 50, 30 and 20 times.

# %%
shown_times = torch.tensor([50.0, 30.0, 20.0])
theta, path = torch.zeros(3, requires_grad=True), []
for _ in range(60):
    path.append(torch.softmax(theta, 0).detach())
    cross_entropy = -(shown_times / 100 * torch.log_softmax(theta, 0)).sum()
    (gradient,) = torch.autograd.grad(cross_entropy, theta)
    theta = (theta - 2.0 * gradient).detach().requires_grad_()
entropy = -(shown_times / 100 * (shown_times / 100).log()).sum()

fig, ax = plt.subplots()
ax.plot(torch.stack(path))
for share in shown_times / 100:
    ax.axhline(share, color="black", lw=1, ls=":")
ax.set(xlabel="step", ylabel="probability", title="SFT copies the frequencies")
plt.show()
print(f"loss {cross_entropy:.4f}, entropy of what was shown {entropy:.4f}")

# %% [markdown]
# The model copies the frequencies of the answers. The loss cannot fall below their entropy.

# %% [markdown]
# ## Now on a language model
#
# The task is to spell a word of four letters backwards. The teachers are careless: in 60 % of their answers they swap the
# last two letters. If these two are equal, the answer is still right.

# %%
folder = Path(tempfile.mkdtemp())
words = ["".join(word) for word in itertools.product("abcdefgh", repeat=4)]
random.Random(0).shuffle(words)
rows = [{"prompt": f"{word}>", "answer": word[::-1]} for word in words]
held_out, prompts = rows[:held_out_words], rows[held_out_words:]
shown = tasks.demonstrations(prompts, 0.6, tasks.swap_ending, seed=0)
for row in shown[:4]:
    print(row["prompt"], row["completion"], "" if row["right"] else "  (wrong)")

# %% [markdown]
# A small Qwen3 with one token per character imitates them.

# %%
tiny.model("qwen3", 260, hidden=64, layers=2).save_pretrained(folder / "base")
tiny.tokenizer([shown[0]["prompt"]], 260).save_pretrained(folder / "base")
settings = {"progress": False, "report": False, "threads": 1, "adam_beta2": 0.99}

sft = psigrad.train(
    "sft",
    model=folder / "base",
    dataset=shown,
    max_steps=sft_steps,
    batch_size=64,
    learning_rate=5e-3,
    warmup_steps=20,
    output_dir=str(folder / "sft"),
    **settings,
)

wrong_share = 1 - np.mean([row["right"] for row in shown])
ambiguous = np.mean([row["answer"][-1] != row["answer"][-2] for row in shown])
floor = (
    ambiguous * -(0.4 * np.log(0.4) + 0.6 * np.log(0.6)) / 6
)  # 6 tokens with the space and EOS

fig, ax = plt.subplots()
ax.semilogy(*sft.history.series("loss"))
ax.axhline(floor, color="black", lw=1, ls=":", label="entropy of the demonstrations")
ax.set(xlabel="step", ylabel="loss, nats per token")
ax.legend()
plt.show()

# %% [markdown]
# The loss falls to the entropy of the demonstrations.
#
# On new words, how often is the model right, and how often does it make the teachers' mistake?


# %%
def right(completions, answer, **columns):
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]


def careless(completions, answer, **columns):
    wrong = [tasks.swap_ending(a, random) for a in answer]
    return [
        float(c.strip() == w != a)
        for c, w, a in zip(completions, wrong, answer, strict=True)
    ]


def measure(model, temperature):
    found = {}
    for reward in (right, careless):
        found |= psigrad.evaluate(
            model=model,
            dataset=held_out,
            reward=reward,
            eval_prompts=len(held_out),
            eval_temperature=temperature,
            max_completion_length=7,
            threads=1,
        )
    return [found["eval/right/mean"], found["eval/careless/mean"]]


shares = {
    "shown": [1 - wrong_share, wrong_share],
    "SFT, sampled": measure(sft.model, 1.0),
    "SFT, greedy": measure(sft.model, 0.0),
}
for name, (good, bad) in shares.items():
    print(f"{name:13} right {good:.2f}   the teachers' mistake {bad:.2f}")

# %% [markdown]
# Sampled answers are right about as often as the teachers'. Greedy answers are *worse*, because the likeliest answer is
# the mistake. Imitation learns what is common, not what is right.
#
# ## Where it fails
#
# - The model never sees its own answers, so it does not learn from its own mistakes.
# - The loss cannot say "less of this": Ψ = 1 for every demonstration.
#
# With a reward, Ψ can be negative. GRPO (chapter 7) now trains the same model on its own answers.

# %%
rl = psigrad.train(
    replace(GRPO, kl=None),
    model=sft.model,
    dataset=prompts,
    eval_dataset=held_out,
    reward="exact",
    max_steps=rl_steps,
    eval_steps=5,
    eval_prompts=len(held_out),
    prompts_per_step=16,
    num_generations=8,
    learning_rate=1e-3,
    warmup_steps=5,
    max_completion_length=7,
    output_dir=str(folder / "grpo"),
    **settings,
)
shares["RL, sampled"] = measure(rl.model, 1.0)
shares["RL, greedy"] = measure(rl.model, 0.0)

fig, axes = plt.subplots(1, 2)
axes[0].plot(*rl.history.series("eval/exact/mean"))
axes[0].axhline(1 - wrong_share, color="black", lw=1, ls=":", label="the teachers")
axes[0].set(xlabel="step of GRPO", title="held-out accuracy", ylim=(0, 1))
axes[0].legend()
heights = np.array(list(shares.values()))
axes[1].barh(list(shares), heights[:, 0], color="C2", label="right")
axes[1].barh(
    list(shares), heights[:, 1], left=heights[:, 0], color="C1", label="the mistake"
)
axes[1].invert_yaxis()
axes[1].set(title="answers to new words", xlim=(0, 1))
axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
plt.show()
print(
    f"sampled {shares['RL, sampled'][0]:.2f} right, greedy {shares['RL, greedy'][0]:.2f}"
)

# %% [markdown]
# After a few steps the student surpasses its teachers. This works because the SFT model is sometimes right.
#
# ## The derivation: imitation is a KL, and a policy gradient
#
# Let p(y|x) be the frequency with which teachers answer y. The mean loss has two parts:
#
#     E_p[ −log π(y|x) ] = E_p[ −log p(y|x) ] + KL( p ‖ π ).
#
# The first part is the teachers' entropy, which the student cannot change. The second is 0 only for π = p.
#
# The gradient is the policy gradient with Ψ = 1 and actions from p,
#
#     −∇E_p[ log π(y|x) ] = −E_p[ Σ_t ∇log π(y_t|x, y_<t)·1 ].
#
# With the policy's *own* actions it would be 0 (chapter 2).
#
# ## In pseudocode
#
# ```text
# for each batch of (x, y)
#     z ← tokens of x and y; m_t ← 1 for y and its end, 0 for x
#     loss ← − Σ_t m_t log π(z_t | z_<t) / Σ_t m_t
#     one step of Adam
# ```
#
# ## Read on
#
# - Ouyang and others 2022, *InstructGPT*, arXiv:2203.02155.
# - Ross and others 2011, *DAgger*, arXiv:1011.0686.
# - Zhou and others 2023, *LIMA*, arXiv:2305.11206.
#
# ## Exercises
#
# 1. How low can the mean loss per token be if teachers err in 10 % of the cases?
# 2. Why is the model *worse* with greedy decoding than with sampling? For which shares of mistakes is it better?
# 3. **Rejection fine-tuning** (RAFT) imitates only the model's own best samples. Write its Ψ as a function of a `Batch`,
#    for rewards 0 and 1.

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# It is the entropy of the choice between the two answers, times the share of words for which
# they differ, divided by 6 tokens.
print(f"{ambiguous * -(0.1 * np.log(0.1) + 0.9 * np.log(0.9)) / 6:.3f} nats per token")

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# Greedy decoding takes the more probable of the two answers. With fewer than 50 % mistakes it
# is almost always right, and with more almost never. Sampling is right as often as the
# teachers.
for mistakes in (0.4, 0.6):
    print(
        f"mistakes {mistakes}: sampled {1 - mistakes}, greedy {float(mistakes < 0.5):.0f}"
    )

# %% [markdown]
# ### Answer 3


# %% tags=["hide-cell"]
# Ψ = 1 for rewarded completions, and 0 for the others. There is still no "less of this".
def rewarded_only(batch):
    return (batch.sequence_reward > 0).float()[:, None] * batch.mask


example = Batch(
    mask=mask,
    reward=torch.tensor([[0, 0, 1.0, 0, 0], [0, 0, 0, 0, 0]]),
    logp_old=logp,
    group=torch.zeros(2).long(),
)
print(rewarded_only(example).tolist())
