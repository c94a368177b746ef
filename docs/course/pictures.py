# %% [markdown]
# # 9 · Pictures as tokens, and a counting game
#
# A language model reads vectors: each token's row of the embedding matrix. A **vision-language model** makes such vectors
# from pictures too. Here a small one learns to count squares.

# %%
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import psigrad
from psigrad.language import images
from psigrad.language.data.sources import from_rows
from psigrad.language.data.templates import prompt_ids
from psigrad.language.models import language_model, tiny
from psigrad.language.models.packing import Groups
from psigrad.objective.catalog import GRPO
from psigrad_extras import squares

# %% tags=["parameters"]
games = 4000
held_out_games = 200
sft_steps = 300
rl_steps = 60

# %% [markdown]
# ## A picture is a sequence of patches
#
# A vision transformer cuts a picture into square **patches**, and treats each patch like a token. Our boards have 24 × 24
# pixels, and a patch has 8 × 8 pixels of three colours. So a board is a sequence of nine patches with 192 numbers each.

# %%
folder = Path(tempfile.mkdtemp())
colour, board, _ = squares.boards(5)
pixels = np.asarray(board.draw())
patches = pixels.reshape(3, 8, 3, 8, 3).swapaxes(1, 2)
print(f"{pixels.shape} is cut into {patches.reshape(9, -1).shape}")

fig, axes = plt.subplots(1, 10, width_ratios=[3] + [1] * 9)
for ax, shown in zip(axes, [pixels, *patches.reshape(9, 8, 8, 3)], strict=True):
    ax.imshow(shown)
    ax.set(xticks=[], yticks=[])
axes[0].set_title("one picture")
axes[5].set_title("its nine patches, in order")
plt.show()

# %% [markdown]
# In the **tower**, a small transformer, the patches attend to each other. The **connector** maps each result to a vector
# of the text model's size. In the prompt, a placeholder token marks the place of each vector.

# %%
towers = ("vision_model", "connector")
places = " ".join(squares.PLACES)
texts = [f"How many {one}? {places} 0 1 2 3" for one in squares.COLOURS]
sizes = {"pixels": 24, "patch": 8, "hidden": 96, "layers": 2}
tiny.save_vision_model(texts, folder / "base", **sizes)
model = language_model.load(str(folder / "base"), towers=towers)


def ask(picture, colour):
    parts = [{"type": "image"}, {"type": "text", "text": f"How many {colour}?"}]
    return {"prompt": [{"role": "user", "content": parts}], "images": [picture]}


def encode(question):
    return prompt_ids(model.tokenizer, from_rows([question], "prompt-only").rows[0])


ids = encode(ask(board.draw(), colour))
own = [token for token in ids if token >= images.FIRST]
print(images.decode(model.tokenizer, ids))
print(f"{len(ids)} tokens, of which {len(own)} are the picture's")

# %% [markdown]
# The ids of the placeholders are made from the picture, so different pictures give different prompts.

# %%
again, other = (encode(ask(b.draw(), colour)) for b in (board, squares.boards(6)[1]))
print("the same picture, the same ids:", again == ids)
print("another picture, other ids:    ", other != ids)

# %% [markdown]
# ## The derivation: the gradient reaches the pixels' weights
#
# Let f be the tower with its connector, with weights φ. The text model with weights θ reads
#
#     e_i = f_φ(picture)_i for a token of the picture, e_i = E_θ[x_i] for any other.
#
# The picture is part of the prompt x, so the policy gradient (chapter 2) holds for θ and φ. By the chain rule,
#
#     ∇_φ log π(y|x) = Σ_i ( ∂ log π(y|x) / ∂e_i )·∇_φ f_φ(picture)_i.
#
# SFT, GRPO and DPO need no change. A pretrained tower is usually **frozen**. Ours is random, so it must learn too. All
# three parts get a gradient:

# %%
answers = [
    model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in "0123"
]
logp = model.evaluate(Groups([ids], [answers])).logp[:, 0]
logp[2].backward()
for name in ("vision_model", "connector", "text_model"):
    parts = [p.grad for key, p in model.trainable().items() if f".{name}." in key]
    norm = torch.cat([g.flatten() for g in parts if g is not None]).norm()
    print(f"{name:13} |∇ log π('2')| = {norm:.2f}")

# %% [markdown]
# ## Now on a language model
#
# How many squares have the given colour? The answer is 0 to 3. As in chapter 4 the teachers are careless: half of their
# counts are one too many or too few. The model imitates them, and then learns by GRPO.


# %%
def play(seed):
    colour, board, _ = squares.boards(seed)
    count = str(list(board.colours.values()).count(colour))
    said = [{"role": "assistant", "content": count}]
    return {**ask(board.draw(), colour), "answer": count, "completion": said}


def careless(row, coin):
    count = int(row["answer"])
    if coin.random() < 0.5:
        count += 1 if count == 0 or coin.random() < 0.5 else -1
    return {**row, "completion": [{"role": "assistant", "content": str(count)}]}


rows = [play(seed) for seed in range(games + held_out_games)]
held_out, questions = rows[:held_out_games], rows[held_out_games:]
coin = random.Random(0)
shown = [careless(row, coin) for row in questions]
right = np.mean([s["completion"][0]["content"] == s["answer"] for s in shown])
print(f"right answers of the teachers: {right:.2f}")

settings = {"progress": False, "report": False, "threads": 1, "adam_beta2": 0.99}
settings |= {"trained_towers": towers, "eval_dataset": held_out}
sft = psigrad.train(
    "sft",
    model=folder / "base",
    dataset=shown,
    metric="exact",
    max_completion_length=3,
    eval_prompts=held_out_games,
    max_steps=sft_steps,
    batch_size=64,
    learning_rate=2e-3,
    warmup_steps=20,
    output_dir=str(folder / "sft"),
    **settings,
)
rl = psigrad.train(
    replace(GRPO, kl=None),
    model=sft.model,
    dataset=questions,
    reward="exact",
    max_steps=rl_steps,
    eval_steps=15,
    eval_prompts=held_out_games,
    prompts_per_step=32,
    num_generations=8,
    learning_rate=2e-3,
    warmup_steps=5,
    max_completion_length=3,
    output_dir=str(folder / "grpo"),
    **settings,
)
steps, accuracy = rl.history.series("eval/exact/mean")

# %% [markdown]
# Does the model look at the picture? Ask the same questions with another game's picture. A model that ignores the picture
# is right in a quarter of the cases.

# %%
turned = [row["images"] for row in held_out[1:] + held_out[:1]]
swapped = [row | {"images": own} for row, own in zip(held_out, turned, strict=True)]
found = psigrad.evaluate(
    model=rl.model,
    dataset=swapped,
    reward="exact",
    eval_prompts=held_out_games,
    max_completion_length=3,
    threads=1,
)
blind = found["eval/exact/mean"]

fig, axes = plt.subplots(1, 2)
axes[0].plot(steps, accuracy)
axes[0].axhline(right, color="black", lw=1, ls=":", label="the teachers")
axes[0].set(xlabel="step of GRPO", title="held-out accuracy", ylim=(0, 1))
axes[0].legend()
bars = {"its picture": accuracy[-1], "another's picture": blind, "chance": 0.25}
axes[1].bar(list(bars), list(bars.values()), color=["C2", "C1", "0.7"])
axes[1].set(title="after GRPO", ylim=(0, 1))
plt.show()
print(f"SFT {accuracy[0]:.2f}, GRPO {accuracy[-1]:.2f}, another's picture {blind:.2f}")

# %% [markdown]
# SFT copied the teachers, mistakes included, and GRPO surpassed them. With another game's picture the accuracy falls to
# chance, so the model does look.
#
# What does it look at? Paint one cell white at a time, and see how much less probable the right answer becomes.

# %%
model = language_model.load(str(rl.model))
seed = next(s for s in range(1000) if play(s)["answer"] == "2")
colour, board, _ = squares.boards(seed)


def score(board):
    groups = Groups([encode(ask(board.draw(), colour))], [[answers[2]]])
    with torch.no_grad():
        return float(model.evaluate(groups).logp[0, 0])


drop = np.zeros((3, 3))
for i, place in enumerate(squares.PLACES):
    rest = {key: value for key, value in board.colours.items() if key != place}
    drop[divmod(i, 3)] = score(board) - score(squares.Board(rest))

fig, axes = plt.subplots(1, 2)
axes[0].imshow(board.draw())
axes[0].set(title=f"two {colour} squares", xticks=[], yticks=[])
drawn = axes[1].imshow(drop, cmap="Reds")
axes[1].set(title="loss of log π('2') without the cell", xticks=[], yticks=[])
fig.colorbar(drawn, ax=axes[1])
plt.show()
hides = {place: board.colours.get(place, "white") for place in squares.PLACES}
worth = {
    kind: drop.flatten()[[(hides[p] == colour) == same for p in squares.PLACES]].mean()
    for kind, same in (("counted", True), ("other", False))
}
print({kind: round(float(value), 2) for kind, value in worth.items()})

# %% [markdown]
# To a perfect counter only the two red squares would matter. Here the green square matters more. The model may guess the
# count from how full the board is. Accuracy does not reveal such a shortcut.
#
# ## Where it fails
#
# - Large pictures need many patches (exercise 1).
# - A model can guess that a banana is yellow without looking. Another picture with the same question, as above, reveals
#   this.
#
# [Pictures](../pictures.md) explains how to train on your own pictures.
#
# ## In pseudocode
#
# ```text
# f ← connector(tower(patches of the picture))
# x ← tokens of the prompt, with a placeholder for each row of f
# e ← embeddings of x, with the rows of f at the placeholders
# sample y from the text model on e, without placeholders
# loss and update as in earlier chapters
# ```
#
# ## Read on
#
# - Dosovitskiy and others 2020, *An image is worth 16x16 words*, arXiv:2010.11929.
# - Liu and others 2023, *Visual instruction tuning*, arXiv:2304.08485.
# - Goyal and others 2017, *Making the V in VQA matter*, arXiv:1612.00837.
#
# ## Exercises
#
# 1. A picture has 512 × 512 pixels, and a patch 16 × 16. The connector joins 2 × 2 patches into one token. How many
#    tokens is the picture?
# 2. What is the best accuracy of a model that reads only the question?
# 3. Why must the sampler never draw the placeholder?

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# There are 32 × 32 patches, and a quarter as many tokens.
tokens = (512 // 16) ** 2 // 4
print(tokens)
assert tokens == 256

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# It can only guess the most frequent count, and all four are about equally frequent.
counts = np.bincount([int(row["answer"]) for row in rows], minlength=4) / len(rows)
print(f"shares of 0 to 3: {counts.round(2)}; the best guess: {counts.max():.2f}")

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# It would stand for a vector of a picture that is not there. Placeholders and vectors would no
# longer match. The sampler draws another token in its place.
print(sum(token == model.vision.token_id for token in ids), "placeholders in the ids")
assert model.vision.token_id in model.vision.forbidden
