"""The gradient of one optimiser step of every kind of training, by name of the parameter, as processes together find it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from psigrad.config import OnlineConfig, Optim
from psigrad.config.algorithms import resolve
from psigrad.language.examples import Answer, Example, LabelledAnswer, Pair
from psigrad.language.models import language_model, scalar_model, sharded, tiny
from psigrad.language.models.backbone import Pretrained
from psigrad.language.models.experts import add_balance_loss, balance_of
from psigrad.language.models.lora import Lora
from psigrad.language.models.towers import layers_of
from psigrad.language.rollout.types import Completion, SamplingParams, Trajectory
from psigrad.language.training.loss_sums import LossSums
from psigrad.language.training.offline import sft_task
from psigrad.language.training.offline.preference_task import KTOTask, PreferenceTask
from psigrad.language.training.offline.reward_task import RewardTask
from psigrad.language.training.offline.sft_task import SFTTask
from psigrad.language.training.online import online_rl
from psigrad.language.training.online.annotators.old_log_probs import compute_log_probs
from psigrad.language.training.online.annotators.values import compute_values
from psigrad.language.training.online.batching import micro_batches, rows_of, to_batch
from psigrad.language.training.online.figures import TokenFigures
from psigrad.language.training.online.online_run import ValueModel
from psigrad.objective.preferences.preference_catalog import DPO, KTO
from psigrad.objective.preferences.reward_model import BradleyTerry
from psigrad.optim import Optimizer, add_up
from psigrad.processes.parallel.shards import shard_like
from psigrad.processes.parallel.world import World, shard

VOCABULARY, BUDGET = 300, 120


def make_models(folder: Path) -> None:
    """tied/ and untied/, whose head is large enough for the closed-form log-probs, and experts/."""
    corpus = [f"{a} plus {b} is {a + b}" for a in range(40) for b in range(40)]
    tokenizer = tiny.tokenizer(corpus, VOCABULARY)
    for name in ("tied", "untied"):
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        model = tiny.model("qwen3", VOCABULARY, hidden=64, tied=name == "tied", eos_token_id=eos, pad_token_id=pad)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_local_experts": 4}
    ends = {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad, "initializer_range": 0.1}
    mixture = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", vocab_size=VOCABULARY, **sizes, **ends))
    mixture.save_pretrained(folder / "experts")
    tokenizer.save_pretrained(folder / "experts")


def groups_of(prompts: int = 7, members: int = 3, seed: int = 0, longest: int = 24) -> list[list[Trajectory]]:
    """Scored groups of very unlike lengths, without any model."""
    r = random.Random(seed)
    found = []
    for p in range(prompts):
        ids = tuple(r.randrange(4, 250) for _ in range(r.randrange(3, 12)))
        group = []
        for k in range(members):
            length = r.randrange(1, 4 if p % 2 else longest)
            tokens = tuple(r.randrange(4, 250) for _ in range(length))
            logps = tuple(-5.0 - r.random() for _ in tokens)
            reward = r.random() + (0.25 if k == 0 else 0.0)
            group.append(Trajectory(p, k, ids, Completion(tokens, logps, logps, "stop", k), 0, reward=reward, status="scored"))
        found.append(group)
    return found


@dataclass(frozen=True)
class Case:
    """A way to train: what learns, and the losses of one step."""

    losses: Callable[..., list[Callable[[], torch.Tensor]]]
    folder: str = "tied"
    lora: Lora | None = None
    scalar: bool = False
    value_head: bool = False
    critic: bool = False
    dtype: str = "float32"
    recompute: bool = False
    algorithm: str = "dapo"
    device: str = "cpu"
    balance: float = 0.0
    """Weight of the loss that keeps the load of experts even. Each pass has its own; its rows must not depend on the ranks."""


def online(case: Case, world: World, model, critic, groups, control: str) -> list[Callable[[], torch.Tensor]]:
    algorithm = resolve(case.algorithm)
    if case.algorithm == "ppo" and case.value_head:
        algorithm = replace(algorithm, kl=None)
    batch = to_batch(groups)
    if batch.logp_old.dtype != torch.float64 and case.dtype == "float64":
        batch = replace(batch, **{n: x.double() for n, x in vars(batch).items() if torch.is_tensor(x) and x.is_floating_point()})
    again = compute_log_probs(model, batch, BUDGET, 1.0, world=world)
    batch = replace(batch, logp_old=again - 0.05, logp_ref=again + 0.1)
    if algorithm.needs_critic:
        batch = replace(batch, value=compute_values(critic or model, batch, BUDGET, world=world))
    prepared = algorithm.prepare(batch, algorithm.initial_state())
    run = SimpleNamespace(
        model=model,
        annotators=(),
        critic=None if critic is None else ValueModel(critic, None, 0.1),
        params=SamplingParams(64),
        config=OnlineConfig(num_iterations=2),
        world=world,
        single_pass=False,
    )
    rows = torch.arange(len(batch.mask))
    parts = shard(world, micro_batches(batch, prepared.needs_gradient, BUDGET, world.size))
    totals = algorithm.totals(prepared, rows)
    if control == "own counts":  # the usual mistake: each process divides by what it has
        own = torch.cat([rows_of(micro) for micro, _ in parts])
        totals = algorithm.totals(prepared, own)
    passes = online_rl.Passes(run, algorithm, prepared, LossSums(world), TokenFigures(0, prepared), None, warms_up=False)
    return list(passes.losses(parts, totals))


def offline(make_task, case: Case, world: World, model, critic, groups, control: str) -> list[Callable[[], torch.Tensor]]:
    task = make_task(model, [t for group in groups for t in group], groups)
    sums = LossSums(world)
    whole = task.shares(range(len(task)), BUDGET, 4 if case.balance else world.size)
    shares = shard(world, [partial(add_balance_loss, model, share, len(whole)) for share in whole])
    return [partial(sums.of, share, w) for share, w in shares]


def _answer(t: Trajectory) -> Answer:
    return Answer(list(t.completion.ids), [True] * len(t.completion.ids))


def sft(model, rows, groups):
    made = [([*t.prompt_ids, *t.completion.ids], len(t.prompt_ids)) for t in rows]
    return SFTTask(model, [[Example(ids, [i >= n for i in range(len(ids))], False)] for ids, n in made])


def pairs_of(groups):
    return [Pair(list(g[0].prompt_ids), _answer(g[0]), _answer(g[1])) for g in groups]


def dpo(model, rows, groups):
    made = pairs_of(groups)
    return PreferenceTask(model, DPO, made, [[-5.0 - i, -6.0] for i in range(len(made))])


def kto(model, rows, groups):
    made = [LabelledAnswer(list(t.prompt_ids), _answer(t), bool(i % 2)) for i, t in enumerate(rows)]
    return KTOTask(model, KTO, made, [[-5.0 - i, -6.0] for i in range(len(made))])


def reward(model, rows, groups):
    return RewardTask(model, BradleyTerry(), pairs_of(groups))


CASES = {
    "dapo": Case(online),
    "dapo untied": Case(online, "untied"),
    "dapo recomputed": Case(online, recompute=True),
    "dapo bfloat16": Case(online, dtype="bfloat16"),
    "grpo": Case(online, algorithm="grpo"),
    "ppo": Case(online, algorithm="ppo", critic=True),
    "ppo shared": Case(online, algorithm="ppo", value_head=True),
    "ppo shared bfloat16": Case(online, algorithm="ppo", value_head=True, dtype="bfloat16"),
    "lora": Case(online, lora=Lora(4)),
    "lora dropout": Case(online, lora=Lora(4, dropout=0.3)),
    "sft": Case(partial(offline, sft)),
    "experts": Case(partial(offline, sft), "experts", balance=0.5),
    "experts online": Case(online, "experts"),
    "dpo": Case(partial(offline, dpo), "untied"),
    "kto": Case(partial(offline, kto)),
    "reward": Case(partial(offline, reward), scalar=True),
}
MODULES = {name: CASES[name] for name in ("dapo", "dapo untied", "dapo recomputed", "sft", "reward", "ppo shared")}
DOUBLE = {"dapo": Case(online, dtype="float64"), "sft": Case(partial(offline, sft), "untied", dtype="float64")}
CONTROLS = ("own counts", "mean", "root only", "layers unseen")


def load(case: Case, folder: Path, world: World, control: str = ""):
    """(the model that learns, its critic)."""
    kwargs = {"dtype": case.dtype, "device": case.device, "gradient_checkpointing": case.recompute}
    torch.manual_seed(0)
    if case.scalar:
        model = scalar_model.load(str(folder / case.folder), **kwargs)
    else:
        model = language_model.load(str(folder / case.folder), lora=case.lora, **kwargs)
    if case.lora:  # a fresh adapter's B is 0, and then A has no gradient
        for name, p in model.trainable().items():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.05)
    if case.balance:
        model.load_balancing = balance_of(model.network, case.balance)
    if case.value_head:
        model.add_value_head()
        nn.init.normal_(model.value_head.weight, std=0.1)
    critic = scalar_model.load(str(folder / case.folder), **kwargs) if case.critic else None
    for each in filter(None, (model, critic)):
        if case.device != "cpu":
            each.attend("auto")
        if world.lockstep:
            sharded.shard(each, world)
            _sabotage(each, control)
    return model, critic


def _sabotage(model, control: str) -> None:
    if control == "root only":  # the factor acts per module: the layers keep torch's mean
        for layer in layers_of(model.network):
            layer.set_gradient_divide_factor(2.0)
            layer.set_force_sum_reduction_for_comms(False)
    if control == "layers unseen":  # the decoder goes on with the tensors that it was made with
        model.decoder.in_shards = False


def gradient(case: Case, folder: Path, world: World, control: str = "") -> dict[str, torch.Tensor]:
    """Every learning parameter's gradient, whole, by name; the norm that clipping sees; and log-probs after a step."""
    model, critic = load(case, folder, world, control)
    learners = {"": model, **({"critic.": critic} if critic is not None else {})}
    optimizers = [Optimizer(each.trainable(), Optim(learning_rate=1e-2), world=world) for each in learners.values()]
    add_up(optimizers, case.losses(case, world, model, critic, groups_of(), control))
    found = {}
    for prefix, optimizer in zip(learners, optimizers, strict=True):
        for name, p in optimizer.parameters.items():
            master = optimizer.masters[name]  # where half-precision gradients of several passes are added up
            own = p.grad if p.grad is not None or master.grad is None else shard_like(master.grad, p)
            whole = own if own is None or not hasattr(own, "full_tensor") else own.full_tensor()
            found[prefix + name] = torch.full(p.shape, float("nan")) if whole is None else whole.detach().clone()
            if control == "mean":
                found[prefix + name] /= world.size
        norm = optimizer.norm()
        found[f"norm of {prefix}"] = torch.tensor(norm, dtype=torch.float64)
        optimizer.apply(norm, 1e-2)
    with torch.no_grad():
        batch = to_batch(groups_of(seed=1))
        after = (
            compute_values(model, batch, BUDGET, world=world)
            if case.scalar
            else compute_log_probs(model, batch, BUDGET, 1.0, world=world)
        )
    return found | {"after a step": after}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of all parameters' gradients."""
    names = [name for name in one if not name.startswith(("norm of", "after"))]
    assert one.keys() == other.keys()
    bad = [name for name in names if one[name].isnan().any() != other[name].isnan().any()]
    assert not bad, f"without gradient on one side: {bad}"
    apart = sum(float((one[n].double() - other[n].double()).nan_to_num().pow(2).sum()) for n in names)
    return (apart / sum(float(one[n].double().nan_to_num().pow(2).sum()) for n in names)) ** 0.5


def held_out(world: World, folder: str, out: str, control: str = "") -> None:
    """Write `out`-held-out.json: of each offline case its figures, and the tokens of each rank's forward passes."""
    read: list[int] = []
    forward = Pretrained.forward

    def counting(self, input_ids, *arguments, **named):
        read.append(input_ids.numel())
        return forward(self, input_ids, *arguments, **named)

    Pretrained.forward = counting
    if control == "own share":  # the usual mistake: a rank takes what it has for the whole
        sft_task.map_shared = lambda world, parts, of: [of(part) for part, _ in shard(world, parts)]
    found = {}
    for name in ("sft", "dpo", "kto", "reward"):
        model, _ = load(CASES[name], Path(folder), world)
        groups = groups_of(prompts=14)
        task = CASES[name].losses.args[0](model, [t for group in groups for t in group], groups)
        read.clear()
        with torch.no_grad():
            figures = task.held_out(BUDGET, world)
        found[name] = {"figures": world.all_gather(figures), "tokens": world.all_gather(sum(read))}
    if world.rank == 0:
        Path(f"{out}-held-out.json").write_text(json.dumps(found))


def main(world: World, folder: str, out: str, names: str, control: str = "") -> None:
    """Write `out`-<kind>-<case>.safetensors for the cases named: of "native", or of both other kinds."""
    tables = {"native": {"native": CASES}, "transformers": {"modules": MODULES, "double": DOUBLE}}
    group, _, wanted = names.partition(":")
    for kind, table in tables[group].items():
        for name in wanted.split(",") if wanted else table:
            found = gradient(table[name], Path(folder), world, control)
            if world.rank == 0:
                place = f"{out}-{kind}-{name.replace(' ', '_')}.safetensors"
                save_file({key: x.contiguous() for key, x in found.items()}, place)
