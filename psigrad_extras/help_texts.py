"""Help texts of commands without settings classes, and the words with which the demo starts."""

from __future__ import annotations

PAIRS = """\
Write pairs of a chosen and a rejected completion. A row of the dataset has a ranking of its completions, a list of
ratings, or one completion with its rating. Ties are dropped and counted.
--dataset: file with the rows
--output: file for the pairs
--columns: rename columns, such as question=prompt
--scale: highest rating; the lowest is 1
--tie: ratings that differ by at most this are a tie (default 0)"""

EXPORT = """\
Write a model to a new folder. RUN_OR_MODEL is a run, a folder, a hub name or a GGUF file.
--to: gguf (one file for llama.cpp, and a Modelfile for Ollama), merged (for transformers) or adapter (for peft)
--output: folder to write; by default NAME-FORMAT in the current folder
--quantization: number format of a GGUF file: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0
--trust-remote-code: run the model's own Python code"""

MERGE = """\
Write a model to a new folder for transformers, with its adapter merged into its base model. RUN_OR_MODEL is a run, a
folder, a hub name or a GGUF file.
--output: folder to write; by default NAME-merged in the current folder
--trust-remote-code: run the model's own Python code"""

REPLAY = """\
Recompute a step of an online run from the nearest earlier checkpoint and the run's rows. Print every difference from the
record; the exit status is 1 if there is any.
--step: the step to recompute, from 1
--method: one or more other methods for the same completions: dapo, or a variant such as '{preset: grpo, kl: null}'
--output: file for a page with every token; by default in RUN/replays/"""

REFEREE = """\
Train with TRL and psigrad on the same rows and tokens (--trl, and optionally psigrad's settings file), or with two settings
files of psigrad. Print the first tensor that differs; the exit status is then 1. Nothing is saved.
--trl: TRL script with its arguments, in quotes; it runs unmodified. Without a settings file, its settings are converted
--python: Python interpreter that runs TRL's script
--steps: steps to compare; a step is one round of sampling with all its updates
--tolerance: difference that counts as rounding, as a share of a tensor's scale; by default 1e-4, or 5e-2 in half precision"""

SWEEP = """\
Search over any settings with Optuna. METHOD is any method that `psigrad --all` lists, or the two words
`control ppo`. The same command resumes a stopped study.
--search: one or more settings, each with its range (:log: on a log scale) or its values
--trials: number of trials in the study
--seeds: seeds of each trial, such as 0 1 2; the trial's value is the mean over them (default 0)
--metric: held-out metric to optimise; by default the one in a run's last line
--direction: minimize or maximize; by default minimize for a loss, otherwise maximize
--output-dir: folder of the study"""

FROM_TRL = """\
Print psigrad's equivalent settings, as YAML and as a command, and the differences from TRL. The script is read, not run.
--trainer: TRL's trainer, such as grpo, if the file does not name it
--output: write the YAML to this file instead of printing it"""

PUSH = """\
Upload the model of a finished run (its folder model/) with its model card to REPO (user/name) on the Hugging Face hub. The
token is read from HF_TOKEN or `hf auth login`. An existing repository gets a new commit.
--private: make a new repository private
--revision: branch to upload to, created if it is missing; by default main"""

DEMO = """\
A small language model learns to spell words backwards: first from demonstrations, of which 60 % make the same
mistake, then from rewards that notice it. The model is tested on new words after each stage. The demo takes two to
five minutes on two cores and downloads nothing. The same command resumes a stopped demo. Its DIR/grpo/report.html
shows the result, and `psigrad chat DIR/grpo` talks to the model.
--output-dir: folder of the demo's runs
--seed: seed of data, model and samples (default 0)
--sft-steps: training steps from demonstrations (SFT)
--rl-steps: training steps from rewards (GRPO)
--progress: show progress bars (the default); --no-progress prints only the result
--vision: train a vision-language model on a game about pictures instead; takes seven minutes"""

DEMO_STARTS = """\
A small language model (1.3 million parameters) learns to spell words backward, on your CPU.
It copies demonstrations, 60 % of which contain the same mistake, then unlearns the mistake by reinforcement learning.
This takes two to five minutes on two idle cores. Ctrl-C saves and stops; the same command resumes."""
VISION_STARTS = """\
A small vision-language model (0.5 million parameters) learns a game about pictures, on your CPU: to count the squares of
a colour, and then to find the only such square in a second picture. It copies games in which half of the answers are
wrong, then unlearns the mistakes by reinforcement learning. Ctrl-C saves and stops; the same command resumes."""
