# %% [markdown]
# # 2 · Bandits and baselines
#
# Now the rewards are unknown: we can only try actions. The simplest case is a **bandit**, a slot machine with several
# arms. Each episode is one pull.

# %%
import matplotlib.pyplot as plt
import torch

from psigrad.objective import Batch, PolicyGradient, PolicyOutputs
from psigrad.objective.parts import aggregate, ratio
from psigrad.objective.parts.advantage import group_mean, leave_one_out, total_return
from psigrad.objective.parts.surrogate import score

# %% tags=["parameters"]
groups = 20_000  # gradient estimates for each figure
seeds = 100  # learners
steps = 200

# %% [markdown]
# ## The log trick
#
# The policy is a softmax over five arms, π_a ∝ exp θ_a. With unknown mean rewards μ, its expected reward is J(θ) = Σ_a
# π_a·μ_a. Since ∇π = π·∇log π,
#
#     ∇J = Σ_a ∇π_a·μ_a = Σ_a π_a·∇log π_a·μ_a = E[ ∇log π(a)·R ].
#
# We can sample this: pull an arm, see its reward R, and move θ along ∇log π(a)·R. This is **REINFORCE**. With several
# steps it becomes the **policy gradient** of all later chapters,
#
#     ∇J = E[ Σ_t ∇log π(a_t|s_t)·Ψ_t ].
#
# Ψ says how good an action was, here R. To check the estimates, we also compute ∇J exactly from μ:

# %%
means = torch.tensor([10.0, 10.2, 10.4, 10.6, 11.0])
theta = torch.tensor([0.5, 0.3, 0.0, -0.2, -0.5])
policy = torch.softmax(theta, 0)
truth = policy * (means - policy @ means)  # ∇J of a softmax, exactly
print("policy  ", [round(p, 2) for p in policy.tolist()])
print("gradient", [round(g, 3) for g in truth.tolist()])


# %% [markdown]
# Each group of 8 pulls gives one estimate of ∇J.


# %%
def pulls(policy, groups, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    arms = torch.multinomial(policy, groups * size, True, generator=generator)
    noise = 0.5 * torch.randn(len(arms), generator=generator)
    return arms, Batch(
        mask=torch.ones(len(arms), 1, dtype=torch.bool),
        reward=(means[arms] + noise)[:, None],
        logp_old=policy.log()[arms][:, None],
        group=torch.arange(groups).repeat_interleave(size),
        inputs=arms,
    )


def estimates(psi, size=8):
    arms, batch = pulls(policy, groups, size)
    grad_log = torch.nn.functional.one_hot(arms, 5) - policy  # ∇log π(a), by θ
    return (psi(batch) * grad_log).view(groups, size, 5).mean(1)


def report(name, found):
    error = found.std(0) / len(found) ** 0.5
    z = ((found.mean(0) - truth) / error).abs().max()
    print(
        f"{name:22} variance {found.var(0).sum():8.3f}   bias {z:6.1f} standard errors"
    )
    return found


plain = report("Ψ = R", estimates(total_return()))

# %% [markdown]
# The estimates have no measurable bias, but a very large variance. All arms pay about 10, so every pull makes its arm
# much more probable.
#
# ## A baseline
#
# Subtract from R a number b that does not depend on the action. The expectation stays the same:
#
#     E[ ∇log π(a)·b ] = b·Σ_a ∇π_a = b·∇1 = 0.
#
# In the **leave-one-out** baseline of RLOO, b is the mean of the group's other pulls:
#
#     Ψ_i = R_i − mean of the other R_j.


# %%
def minus_own_arm(batch):  # wrong on purpose: this baseline looks at the action
    return batch.reward - means[batch.inputs][:, None]


report("Ψ = R", plain)
others = report("R − mean of others", estimates(leave_one_out))
own = report("R − mean of group", estimates(group_mean(std=False)))
wrong = report("R − μ of its own arm", estimates(minus_own_arm))

fig, axes = plt.subplots(1, 2, sharex=True)
for ax, name, found in zip(
    axes, ("Ψ = R", "R − mean of others"), (plain, others), strict=True
):
    along = found @ truth / (truth @ truth)
    ax.hist(along.clamp(-60, 60), bins=80, density=True)
    ax.axvline(1, color="black", lw=1)
    ax.set(title=name, xlabel="estimate along ∇J  (truth: 1)", yticks=[])
plt.show()

# %% [markdown]
# - The leave-one-out baseline cuts the variance more than a hundredfold.
# - The mean of the *whole* group contains R_i itself. With K pulls this scales the gradient by (K − 1)/K, as in GRPO
#   (chapter 7).
# - A baseline must not depend on the action. With the pulled arm's mean reward as baseline, the estimates average 0.
#
# ## The variance depends on the level of the rewards
#
# Add a constant to all rewards:

# %%
shifts = torch.linspace(-10, 10, 21)
found = {"Ψ = R": [], "R − mean of others": []}
for shift in shifts:
    arms, batch = pulls(policy, groups // 10)
    batch.reward.add_(shift - 10)
    grad_log = torch.nn.functional.one_hot(arms, 5) - policy
    for name, psi in zip(found, (total_return(), leave_one_out), strict=True):
        g = (psi(batch) * grad_log).view(-1, 8, 5).mean(1)
        found[name].append(float(g.var(0).sum()))

fig, ax = plt.subplots()
for name, variance in found.items():
    ax.semilogy(shifts, variance, label=name)
ax.set(xlabel="constant added to rewards of about 0", ylabel="variance of ĝ")
ax.legend()
plt.show()


# %% [markdown]
# Without a baseline the variance grows with the square of the constant. With the baseline the constant cancels.
#
# ## Does it learn?
#
# We train one hundred learners at once, without and with the baseline.


# %%
def learn(psi, rate):
    method = PolicyGradient(psi, ratio.none, score, aggregate.sequence_sum)
    theta = torch.zeros(seeds, 5, requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    history = []
    for _ in range(steps):
        logp = torch.log_softmax(theta, 1)
        arms = torch.multinomial(
            logp.exp().detach(), 8, True, generator=generator
        ).flatten()
        rows = torch.arange(seeds).repeat_interleave(8)
        reward = means[arms] + 0.5 * torch.randn(len(arms), generator=generator)
        chosen = logp[rows, arms][:, None]
        mask = torch.ones_like(chosen, dtype=torch.bool)
        batch = Batch(mask=mask, reward=reward[:, None], logp_old=chosen, group=rows)
        prepared = method.prepare(batch, method.initial_state())
        loss = method.loss(
            prepared, PolicyOutputs(chosen), method.totals(prepared), {}
        ).value
        (gradient,) = torch.autograd.grad(loss * seeds, theta)
        theta = (theta - rate * gradient).detach().requires_grad_()
        history.append((torch.softmax(theta, 1).detach() @ means).sort(0).values)
    return torch.stack(history), theta.detach()


fig, axes = plt.subplots(1, 2, sharey=True)
best = {}
for ax, (name, psi) in zip(
    axes,
    {"Ψ = R": total_return(), "R − mean of others": leave_one_out}.items(),
    strict=True,
):
    history, end = learn(psi, 0.5)
    ax.plot(history[:, seeds // 2], label="median learner")
    ax.fill_between(
        range(steps),
        history[:, seeds // 10],
        history[:, -seeds // 10],
        alpha=0.25,
        lw=0,
    )
    ax.axhline(11, color="black", lw=1, ls=":")
    ax.set(title=name, xlabel="step")
    best[name] = float((end.argmax(1) == 4).float().mean())
axes[0].set_ylabel("expected reward")
plt.show()
for name, share in best.items():
    print(f"{name:20} {share:.0%} of the learners prefer the best arm in the end")

# %% [markdown]
# ## Where it fails
#
# Without a baseline, the arms that were pulled first become much more probable. **The policy collapses before it has
# found the best arm.**

# %% [markdown]
# ## Now on a language model
#
# A prompt is a bandit whose arms are all possible completions. A completion's log-probability is a sum over tokens, so
#
#     ∇log π(y|x) = Σ_t ∇log π(y_t|x, y_<t).
#
# A small Qwen3 with random weights writes 6 tokens from a vocabulary of 8. The reward is 1 plus the share of token 0.

# %%
from dataclasses import replace

from psigrad.language.models import tiny
from psigrad.objective.catalog import RLOO

model = tiny.model("qwen3", 9, hidden=32, layers=1)
parameters = list(model.parameters())
prompt = torch.full((8, 1), 8)  # one prompt, a group of 8 completions


def gradient(psi):
    tokens = prompt
    with torch.no_grad():
        for _ in range(6):
            logits = model(tokens).logits[:, -1, :8]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(1), 1)], 1)
    logp = model(tokens[:, :-1]).logits[..., :8].log_softmax(2)
    logp = logp.gather(2, tokens[:, 1:, None])[..., 0]
    mask = torch.ones_like(logp, dtype=torch.bool)
    reward = torch.zeros(8, 6)
    reward[:, -1] = 1 + (tokens[:, 1:] == 0).float().mean(1)
    group = torch.zeros(8, dtype=torch.long)
    batch = Batch(mask=mask, reward=reward, logp_old=logp, group=group)
    method = replace(RLOO, psi=psi, kl=None)
    prepared = method.prepare(batch, method.initial_state())
    loss = method.loss(prepared, PolicyOutputs(logp), method.totals(prepared), {}).value
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


torch.manual_seed(0)
count = max(20, groups // 100)
spread = {}
for name, psi in {"Ψ = R": total_return(), "RLOO": leave_one_out}.items():
    found = torch.stack([gradient(psi) for _ in range(count)])
    spread[name] = float(found.var(0).sum())
    print(
        f"{name:6} variance of the gradient, {found.shape[1]} weights: {spread[name]:.4f}"
    )
print(f"ratio {spread['Ψ = R'] / spread['RLOO']:.0f}")

# %% [markdown]
# The baseline works for a transformer too. This is why RLOO and GRPO draw several completions for each prompt.
#
# ## The derivation: from one step to many
#
# In the probability of an episode τ only the factors π depend on θ:
#
#     P(τ) = P(s_0)·Π_t π(a_t|s_t)·P(s_{t+1}|s_t, a_t).
#
# The other factors drop out of ∇log P(τ), and the log trick gives
#
#     ∇J = E[ R(τ)·∇log P(τ) ] = E[ Σ_t ∇log π(a_t|s_t)·R(τ) ].
#
# An action cannot change earlier rewards, so these act like a baseline. The sum of later rewards, minus any b(s_t), may
# replace R(τ).
#
# ## In pseudocode
#
# ```text
# repeat
#     draw K actions a_i from π_θ; see their rewards R_i
#     Ψ_i ← R_i − mean of the other rewards
#     θ ← θ + (α/K) Σ_i ∇log π_θ(a_i)·Ψ_i
# ```
#
# ## Read on
#
# - Williams 1992, *Simple statistical gradient-following algorithms*, Machine Learning 8.
# - Sutton and others 2000, *Policy gradient methods*, NIPS 12.
# - Kool and others 2019, *Buy 4 REINFORCE samples, get a baseline for free!*
#
# ## Exercises
#
# 1. Which constant baseline has the least variance? Minimise E[‖∇log π(a)‖²·(R − b)²] over b. Is it much better than the
#    mean reward?
# 2. How does the variance of the leave-one-out estimate fall with K? Compare K = 2, 4, 8, 16 at the same number of pulls.
# 3. Predict the bias of `group_mean(std=False)` for K = 2, and check it.

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# b* = E[‖∇log π‖²·R] / E[‖∇log π‖²] is a mean of R that gives rare arms more weight. All arms
# pay about the same, so it is hardly better than the mean.
squared = ((torch.eye(5) - policy) ** 2).sum(1)  # ‖∇log π(a)‖² of each arm
optimal = float((policy * squared * means).sum() / (policy * squared).sum())
usual = float(policy @ means)
for name, b in (("mean reward", usual), ("optimal", optimal)):
    report(f"b = {b:.3f}, {name}", estimates(lambda batch, b=b: batch.reward - b))

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# The baseline is a mean of K − 1 rewards and has its own variance. So the variance of R − b is
# K/(K−1) times that with the true mean: 2 times for K = 2, and 1.07 times for K = 16.
for size in (2, 4, 8, 16):
    variance = size * estimates(leave_one_out, size).var(0).sum()
    print(
        f"K = {size:2}: variance of one pull {variance:.3f}, K/(K−1) = {size / (size - 1):.2f}"
    )

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# The estimate has the right direction, but only half the length: (K − 1)/K = 1/2.
half = estimates(group_mean(std=False), 2).mean(0)
print("estimate / truth:", [round(r, 2) for r in (half / truth).tolist()])
