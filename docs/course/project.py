# %% [markdown]
# # 10 · The closing project: a task of your own
#
# Train a model that is better than its demonstrations, on a task that *you* choose. First run the example, in which a
# model learns to sort letters. Then put your own task into milestones 1 and 2. The checks print ✓ or what is missing.

# %%
import itertools
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import psigrad
from psigrad.intervals import mean_interval
from psigrad.language.models import tiny

# %% tags=["parameters"]
sft_steps = 300
rl_steps = 40
held_out_rows = 200

# %% [markdown]
# ## What makes a good task
#
# - A program can check the answer. Otherwise use the method of chapter 5.
# - You can make rows outside the training data.
# - After imitation, the small model sometimes solves the task.
#
# A group of completions has signal if its rewards differ. With p the chance of a right answer,
#
#     P(a group of G has signal) = 1 − p^G − (1 − p)^G.
#
# Ideas: the next day of a date, a Caesar cipher, the smaller of two fractions. For a pretrained model: one of `psigrad
# tasks`, at a level where it is right in 5 to 50 % of cases.

# %%
checks = {}


def check(milestone, **found):
    for name, holds in found.items():
        checks[milestone, name] = bool(holds)
        words = name.replace("_", " ")
        print(f"{milestone}  {'✓' if holds else '✗ not yet:'} {words}")


# %% [markdown]
# ## Milestone 1: rows
#
# A row has a prompt and the columns that the reward reads. Demonstrations also have completions. Here 60 % of these have
# the last two letters swapped.


# %%
def answer_to(prompt):
    return "".join(sorted(prompt.removesuffix(">")))


def careless(answer):
    return answer[:-2] + answer[-1] + answer[-2]


texts = ["".join(t) for t in itertools.permutations("abcdefgh", 4)]
random.Random(0).shuffle(texts)
rows = [{"prompt": f"{text}>", "answer": answer_to(f"{text}>")} for text in texts]
held_out, prompts = rows[:held_out_rows], rows[held_out_rows:]
coin = random.Random(1)
shown = [
    {
        **row,
        "completion": careless(row["answer"]) if coin.random() < 0.6 else row["answer"],
    }
    for row in prompts
]
seen = {row["prompt"] for row in prompts}
check(
    1,
    no_held_out_prompt_is_trained_on=not seen & {row["prompt"] for row in held_out},
    every_prompt_is_there_once=len({row["prompt"] for row in rows}) == len(rows),
    at_least_100_rows_are_held_out=len(held_out) >= 100,
)

# %% [markdown]
# ## Milestone 2: a reward, and an attack on it
#
# Write the reward, then attack it with wrong answers: an empty one, the prompt, and the answer twice. `psigrad score
# --attack` tests a reward with many such answers.


# %%
def sorted_right(completions, answer, **columns):
    return [
        float(text == right) for text, right in zip(completions, answer, strict=True)
    ]


def pays_for(reward, text_of):
    texts = [text_of(row) for row in held_out]
    return float(np.mean(reward(texts, answer=[row["answer"] for row in held_out])))


attacks = {
    "the answer": lambda row: row["answer"],
    "nothing": lambda row: "",
    "the prompt": lambda row: row["prompt"],
    "twice": lambda row: row["answer"] * 2,
    "careless": lambda row: careless(row["answer"]),
}
paid = {name: pays_for(sorted_right, text_of) for name, text_of in attacks.items()}
print(paid)
check(
    2,
    the_right_answer_is_paid=paid["the answer"] == 1,
    nothing_else_is=max(paid[name] for name in attacks if name != "the answer") < 0.1,
)

# %% [markdown]
# ## Now on a language model
#
# ### Milestone 3: imitation
#
# A small Qwen3 imitates the demonstrations, as in chapter 4. The loss cannot fall below the entropy of the teachers'
# mistakes,
#
#     loss ≥ −(0.6·log 0.6 + 0.4·log 0.4) / 5 = 0.135 per token.

# %%
work = Path(tempfile.mkdtemp())
tiny.model("qwen3", 260, hidden=64, layers=2).save_pretrained(work / "base")
tiny.tokenizer([shown[0]["prompt"]], 260).save_pretrained(work / "base")
settings = {"progress": False, "report": False, "threads": 1, "adam_beta2": 0.99}
sft = psigrad.train(
    "sft",
    model=work / "base",
    dataset=shown,
    max_steps=sft_steps,
    batch_size=64,
    learning_rate=5e-3,
    output_dir=str(work / "sft"),
    **settings,
)

steps, loss = sft.history.series("loss")
floor = -(0.6 * np.log(0.6) + 0.4 * np.log(0.4)) / 5
fig, ax = plt.subplots()
ax.plot(steps, loss, label="loss per token")
ax.axhline(floor, color="black", lw=1, label="the teachers' entropy")
ax.set(xlabel="step", ylim=(0, 1))
ax.legend()
plt.show()
check(3, the_loss_comes_near_its_floor=np.mean(loss[-20:]) < 2 * floor)

# %% [markdown]
# ## Milestone 4: reinforcement learning
#
# Train the SFT model with GRPO. Make a short run first, and look at the share of groups without signal (chapter 7).

# %%
grpo = psigrad.train(
    "grpo",
    model=sft.model,
    dataset=prompts,
    eval_dataset=held_out,
    reward=sorted_right,
    max_steps=rl_steps,
    eval_steps=5,
    eval_prompts=len(held_out),
    prompts_per_step=16,
    num_generations=8,
    learning_rate=5e-4,
    warmup_steps=5,
    max_completion_length=6,
    beta=0.0,
    output_dir=str(work / "grpo"),
    **settings,
)
fig, axes = plt.subplots(1, 2)
axes[0].plot(*grpo.history.series("eval/sorted_right/mean"))
axes[0].set(title="held-out accuracy", xlabel="update", ylim=(0, 1))
axes[1].plot(*grpo.history.series("frac_reward_zero_std"))
axes[1].set(title="groups without signal", xlabel="update", ylim=(0, 1))
plt.show()
silent = grpo.history.series("frac_reward_zero_std")[1]
check(4, most_groups_have_signal_at_the_start=np.mean(silent[:5]) < 0.5)

# %% [markdown]
# ## Milestone 5: is it better, and how sure are you?
#
# Compare the two models prompt by prompt, with an interval for the difference.


# %%
def answers(run):
    """The greedy answer to each held-out prompt, by plain transformers."""
    model, tokenizer = run.load(), run.tokenizer()
    asked = tokenizer([row["prompt"] for row in held_out], return_tensors="pt")
    made = model.generate(**asked, max_new_tokens=6, do_sample=False)
    written = made[:, asked["input_ids"].shape[1] :]
    return tokenizer.batch_decode(written, skip_special_tokens=True)


right = [row["answer"] for row in held_out]
before, after = answers(sft), answers(grpo)
scores = {
    name: np.array(sorted_right(texts, answer=right))
    for name, texts in {"SFT": before, "GRPO": after}.items()
}
difference = scores["GRPO"] - scores["SFT"]
low, high = mean_interval(difference.tolist())
print({name: float(found.mean()) for name, found in scores.items()})
print(f"GRPO − SFT: {difference.mean():+.2f} [{low:+.2f}, {high:+.2f}]")
for row, one, other in list(zip(held_out, before, after, strict=True))[:6]:
    print(row["prompt"], "SFT", one, " GRPO", other, " right", row["answer"])
check(
    5,
    the_interval_of_the_difference_is_above_0=low > 0,
    it_is_better_than_what_it_was_shown=scores["GRPO"].mean() > 0.4,
)

# %% [markdown]
# ## Milestone 6: say what you found
#
# Write one page with
#
# - the task and its reward;
# - the accuracy before and after, with the interval;
# - three wrong answers, explained;
# - what did not work.
#
# ## Where it fails
#
# - The model learned to sort four letters only. Try five.
# - The interval is over prompts, not over training runs. `psigrad compare` runs several seeds.
#
# ## In pseudocode
#
# ```text
# until you are sure
#     look at rows, answers and rewards; write down what you expect
#     change one thing; run two seeds, short
#     compare on held-out prompts, pair by pair, with an interval
# ```
#
# ## Read on
#
# - Henderson and others 2018, *Deep reinforcement learning that matters*, arXiv:1709.06560.
# - Agarwal and others 2021, *Deep RL at the edge of the statistical precipice*, arXiv:2108.13264.
# - Skalse and others 2022, *Defining and characterizing reward hacking*, arXiv:2209.13085.
#
# ## Exercises
#
# 1. Two models with accuracies of 0.90 and 0.95 answer the same prompts, and disagree on 7 %. How many prompts show which
#    one is better?
# 2. Give half the reward for the right letters in any order. Does the held-out accuracy improve?
# 3. When is p too small for milestone 4?

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# Of the 7 %, the better model wins 6 % and loses 1 %. So the mean difference is 0.05, with a
# standard deviation of √(0.07 − 0.05²) = 0.26 per prompt. An interval of ± 0.05 needs n = (1.96
# · 0.26 / 0.05)² prompts. With separate prompts for each model it would be about twice as many.
paired = (1.96 / 0.05) ** 2 * (0.07 - 0.05**2)
unpaired = (1.96 / 0.05) ** 2 * (0.9 * 0.1 + 0.95 * 0.05)
print(round(paired), round(unpaired))
assert round(paired) == 104 and round(unpaired) == 211

# %% [markdown]
# ### Answer 2


# %% tags=["hide-cell"]
# This reward also accepts the teachers' mistake, so nearly every answer gets at least ½. Only
# the order gives a signal, which is half as large. Nothing is gained here. Such a reward helps
# if the right answer is too rare to be found, but it can be exploited.
def half(completions, answer, **columns):
    letters = [
        sorted(text) == sorted(right)
        for text, right in zip(completions, answer, strict=True)
    ]
    whole = sorted_right(completions, answer)
    return [max(one, 0.5 * other) for one, other in zip(whole, letters, strict=True)]


assert half(["abdc", "abcd", "abc"], ["abcd"] * 3) == [0.5, 1.0, 0.0]
print(pays_for(half, attacks["careless"]))

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# A step of 16 groups of 8 should have at least three with signal: 16·(1 − (1 − p)⁸) ≥ 3 at p ≈
# 0.026. Below about 1 %, imitate more, choose an easier task, or reward parts of the answer.
groups = [16 * (1 - (1 - p) ** 8) for p in (0.005, 0.01, 0.026)]
print([round(count, 1) for count in groups])
assert groups[2] > 3 > 1.5 > groups[1]
