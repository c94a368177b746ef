"""Checks that a model, its data and its settings will train correctly: a value is computed in two ways that must agree.

Each check has a value (the difference between the two ways), a bound, and a control: the value under a planted fault. If the
control does not exceed the bound, the check proves nothing and reports that.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from psigrad.config import Model, OnlineConfig
from psigrad.errors import UserError, reason_of
from psigrad.language.data.dataset_rows import Row, show
from psigrad.language.data.row_rendering import RenderedRow
from psigrad.language.data.templates import describe_rewrites, observation_ids, stop_token_ids
from psigrad.language.episodes.tool_calls import BrokenCall
from psigrad.language.episodes.tools import PROBE, call_form_of
from psigrad.language.loading import model_source
from psigrad.language.loading.load_model import load_model
from psigrad.language.loading.samplers import check_sampling
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.recipes.online_settings import method
from psigrad.language.recipes.row_limits import check_images
from psigrad.language.rollout.samplers.distribution import filter_logits
from psigrad.language.rollout.types import Request
from psigrad.language.training.online.batching import MicroBatch, inputs_of, micro_batches, outputs_by_row, rows_of, to_batch
from psigrad.objective import PolicyGradient, Totals
from psigrad.objective.catalog import DAPO
from psigrad.objective.parts.advantage import total_return
from psigrad.optim import Optimizer, add_up
from psigrad.runs import machine
from psigrad_extras.preflight.check_subject import COMPLETIONS, Finding, Subject, load_subject

FRESH = Lora(4)


def run(config: OnlineConfig, told: Callable[[str], None] = lambda name: None, *, samples: bool = True) -> list[Finding]:
    """Check `config.model` with `config.data` and the other settings of a run. Nothing is trained, and no files remain.

    `told` is called with the name of each check before it starts, since a large model takes minutes. `samples` is False if the
    run samples nothing, such as SFT without rewards. Raises `UserError` if the model or the dataset cannot be read.
    """
    machine.prepare_torch(config.run)
    check_sampling(config.sampling)
    check_images(config)
    found, subject = list[Finding](), load_subject(config, samples=samples)
    tools = (check_tools,) if config.tools or str(config.environment).startswith("mcp:") else ()
    checks = (
        check_data, check_text, *tools, check_packing, check_sharing, check_sampling_logps, check_micro_batches, check_processes,
        check_reference, check_saving, check_adapter,
    )  # fmt: skip
    for i, check in enumerate(checks, 1):
        start, name = time.perf_counter(), (check.__doc__ or "").split('"')[1]
        told(f"{name} ({i} of {len(checks)})")
        try:
            finding = check(subject)
        except (UserError, RuntimeError, ValueError) as error:
            finding = Finding(name, "could not be checked", float("inf"), 0.0, float("inf"), note=reason_of(error))
        found.append(replace(finding, seconds=time.perf_counter() - start))
    return found


def all_pass(findings: Sequence[Finding]) -> bool:
    """Return True if every check passed, and would have failed under its planted fault."""
    return all(finding.verdict == "ok" for finding in findings)


def report(findings: Sequence[Finding], *, as_json: bool = False, rows: Sequence[RenderedRow] = ()) -> str:
    """Return a line for each check, or one JSON object {"passed", "checks", "rows"}."""
    if as_json:
        shown = [{"title": title, "pieces": pieces} for title, pieces in rows]
        return json.dumps({"passed": all_pass(findings), "checks": [f.row() for f in findings], "rows": shown}, indent=1)
    width, what = (max(len(getattr(f, key)) for f in findings) for key in ("name", "what"))
    lines = [f"{'':<9} {'check':<{width}}  {'what is compared':<{what}}  {'result':>8}  {'bound':>8}  {'a fault gives':>13}"]
    for f in findings:
        start = f"{f.verdict:<9} {f.name:<{width}}  {f.what:<{what}}"
        value, bound, control = (f"{x:.0f}" if x >= 100 and x == x // 1 else f"{x:.2g}" for x in (f.value, f.bound, f.control))
        lines.append(f"{start}  {value:>8}  {bound:>8}  {control:>13}  {f.note}".rstrip())
    if unsure := [f for f in findings if f.verdict == "unproven"]:
        cause = "In this precision, rounding would hide a fault; check once with --dtype float32."
        if all(f.control == 0 for f in unsure):
            cause = "A fault would not change the result, because the prompts or the answers are alike; give other prompts."
        lines.append(f"Unproven: {', '.join(f.name for f in unsure)}. {cause}")
    return "\n".join(lines)


def _apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the mean absolute difference of log-probs over all tokens; infinity if a value is not finite."""
    difference = torch.cat([(x.double() - y.double()).abs() for x, y in zip(a, b, strict=True)])
    return float(difference.mean()) if bool(torch.isfinite(difference).all()) else float("inf")


def check_data(subject: Subject) -> Finding:
    """Return the check "data": the number of prompts that are empty or too long."""
    most = subject.config.sampling.max_completion_length if subject.samples else 1
    room = (positions := subject.model.max_length) - most
    bad = [prompt for prompt in subject.dataset if not 0 < len(prompt.ids) <= room]
    minus = f"max_completion_length {most}" if subject.samples else "1 for an answer"
    leaves = f"at most {max(0, room)} tokens fit (the model's {positions} positions minus {minus})"
    note = f"the first at {bad[0].row.source} has {len(bad[0].ids)} tokens; {leaves}" if bad else ""
    what = f"prompts (of {len(subject.dataset)}) that are empty or too long"
    return Finding("data", what, len(bad), 0.0, len(subject.dataset), note=note)


def _problems(model: LanguageModel, row: Row, stops: Sequence[int], vocabulary: int) -> Iterator[str]:
    """Yield problems with the tokens that end a text, and with the chat template."""
    if not model.eos_token_ids:
        yield "there is no EOS token"
    for token in stops:
        if not 0 <= token < vocabulary:
            yield f"the stop token {token} is not one of the model's {vocabulary} tokens"
    if missing := sorted(place for place in model.tokenizer.get_vocab().values() if place >= vocabulary):
        names = ", ".join(map(repr, model.tokenizer.convert_ids_to_tokens(missing[:4])))
        yield f"{len(missing)} tokens of the tokenizer have no row in the embedding ({names})"
    if not isinstance(row.prompt, str) and not set(stop_token_ids(model.tokenizer, row)) <= set(stops):
        yield "the chat template's end-of-turn token does not stop a completion"


def _acts(model: LanguageModel) -> list[str]:
    """Return the settings in the model's generation_config that would change sampling if a sampler applied them."""
    config = model.network.generation_config
    usual = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None, "forced_eos_token_id": None}
    held = {name: getattr(config, name, None) for name in usual} if config is not None else {}
    return [f"{name}={value}" for name, value in held.items() if value not in (None, usual[name])]


def check_text(subject: Subject) -> Finding:
    """Return the check "end of text": the number of errors of the stop tokens and the chat template."""
    model, row = subject.model, subject.prompts[0].row
    stops = sorted({*model.eos_token_ids, *subject.params.stop_token_ids})
    found = list(_problems(model, row, stops, model.vocabulary))
    # A token in the middle of a completion must end it once it is a stop token.
    first = subject.trajectories[0][0]
    places = [place for place, token in enumerate(first.completion.ids[:-1]) if token not in stops]
    request = Request(first.prompt_ids, (0,))
    overrun = 0
    if places:
        token = first.completion.ids[places[0]]
        params = replace(subject.params, stop_token_ids=(*subject.params.stop_token_ids, token))
        ((completion,),) = subject.sampler.sample([request], params)
        overrun = len(completion.ids) - 1 - completion.ids.index(token) if token in completion.ids else 0
        if overrun or (token in completion.ids and completion.finish_reason != "stop"):
            found.append(f"the sampler continues for {overrun} tokens after a stop token")
    notes = describe_rewrites(model.tokenizer, row)
    notes += [f"generation_config has {', '.join(acts)}, which is not used"] if (acts := _acts(model)) else []
    control = list(_problems(model, row, [*stops, model.vocabulary], model.vocabulary))
    what = "errors of stop tokens and chat template"
    return Finding("end of text", what, len(found), 0.0, len(control), note="; ".join([*found, *notes]))


def check_tools(subject: Subject) -> Finding:
    """Return the check "tool calls": the number of errors when a call and its answer are written and parsed."""
    tokenizer, row = subject.model.tokenizer, subject.prompts[0].row
    form = call_form_of(tokenizer)
    found = [] if form.probe(form.seen) == [PROBE] else ["psigrad does not parse the call"]
    try:
        observation_ids(tokenizer, row, [{"role": "tool", "name": PROBE.name, "content": "7"}])
    except UserError as error:
        found.append(reason_of(error))
    # A truncated call must be answered with its error.
    broken = form.probe(form.seen[: form.seen.find("colours")])
    seen = show(" ".join(form.seen.split()), 200) if form.seen else "the chat template writes no call"
    note = "; ".join([f"{form.family or 'any form'}: {seen}", *found])
    control = sum(isinstance(call, BrokenCall) for call in broken)
    return Finding("tool calls", "a call in the template's format and its answer", len(found), 0.0, control, note=note)


def check_packing(subject: Subject) -> Finding:
    """Return the check "packing": the difference of log-probs between packed, padded and single passes."""
    whole = subject.logp(subject.groups)
    padded = subject.logp(subject.groups, packed=False)
    alone = [subject.logp(Groups([p], [[c]]), packed=False)[0] for p, c in subject.alone]
    # The planted fault is attention across the borders of packed texts: every text follows its neighbour.
    behind = [
        subject.logp(Groups([[*p0, *c0, *p]], [[c]]))[0]
        for (p0, c0), (p, c) in zip([subject.alone[-1], *subject.alone], subject.alone, strict=False)
    ]
    value = max(_apart(whole, padded), _apart(whole, alone))
    return Finding(
        "packing",
        "log-probs packed, padded and one by one",
        value,
        subject.bounds[0],
        _apart(behind, alone),
        note=subject.model.slow_reason,
    )


def check_sharing(subject: Subject) -> Finding:
    """Return the check "shared prompts": the difference of log-probs if a prompt is computed once, or for each completion."""
    shared = subject.logp(subject.groups)
    apart = subject.logp(Groups([p for p, _ in subject.alone], [[c] for _, c in subject.alone]))
    prompts = [p for p, _ in subject.alone]
    others = [*prompts[COMPLETIONS:], *prompts[:COMPLETIONS]]
    wrong = subject.logp(Groups(others, [[c] for _, c in subject.alone]))
    what = "a prompt computed once, or for each completion"
    return Finding("shared prompts", what, _apart(shared, apart), subject.bounds[0], _apart(wrong, apart))


def check_sampling_logps(subject: Subject) -> Finding:
    """Return the check "sampling": the difference between the log-probs of the sampler and of the trainer."""
    temperature = subject.params.temperature
    completions = [t.completion for group in subject.trajectories for t in group]
    mine = subject.logp(subject.groups, temperature=temperature)
    theirs = [torch.tensor(c.logprobs, device=subject.model.device) for c in completions]
    value = _apart(mine, theirs)
    if subject.params.filtered:  # the distribution after filters such as top-k, from the trainer's logits
        exact = [_filtered_logps(subject, prompt, ids) for prompt, ids in subject.alone]
        drawn = [torch.tensor(c.sampling_logprobs, device=subject.model.device) for c in completions]
        value = max(value, _apart(exact, drawn))
    warmer = subject.logp(subject.groups, temperature=2 * temperature)
    bound = subject.config.max_logp_difference or max(1e-3, 2 * subject.bounds[0])
    return Finding("sampling", "the sampler's log-probs and the trainer's", value, bound, _apart(warmer, theirs))


@torch.no_grad()
def _filtered_logps(subject: Subject, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    ids = torch.tensor([[*prompt, *completion]], device=subject.model.device)
    logits = subject.model.network(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    allowed = filter_logits(logits / subject.params.temperature, subject.params)
    return torch.log_softmax(allowed, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


@torch.no_grad()
def check_reference(subject: Subject) -> Finding:
    """Return the check "reference": the KL of the untrained model to its reference, which must be 0."""
    reference = subject.model if subject.model.is_own_reference else subject.model.frozen_copy()

    def kl() -> float:
        found = subject.model.evaluate(subject.groups, kl_to=reference).kl
        assert found is not None
        return float(found.abs().mean())

    value = kl()
    with _changed(subject.model):
        control = kl()
    what = "KL of the untrained model to its reference"
    return Finding("reference", what, value, 1e-5 if subject.model.network.dtype == torch.float32 else 1e-2, control)


@contextlib.contextmanager
def _changed(model: LanguageModel) -> Iterator[None]:
    """During the block, change trainable matrices of a model: all that are 0, and the last one that is not."""
    matrices = [p.detach() for p in model.trainable().values() if p.dim() == 2]
    # The second matrix of an adapter starts at 0, so changing its sign would change nothing.
    zero = [p for p in matrices if not bool(p.any())]
    last = next((p for p in reversed(matrices) if bool(p.any())), matrices[-1])
    last.neg_()
    for p in zero:
        p.fill_(0.01)
    try:
        yield
    finally:
        last.neg_()
        for p in zero:
            p.zero_()


def check_saving(subject: Subject) -> Finding:
    """Return the check "saving": the difference of log-probs before saving and after loading the model."""
    before = subject.logp(subject.groups)
    settings = Model(path="", dtype=subject.config.model.dtype, trust_remote_code=subject.config.model.trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="psigrad-check-") as folder:
        subject.model.save_merged(Path(folder))
        loaded = load_model(replace(settings, path=folder), subject.config.run, None)
    again = replace(subject, model=loaded)
    value = _apart(before, again.logp(subject.groups))
    with _changed(loaded):
        control = _apart(before, again.logp(subject.groups))
    # A merged adapter is rounded once more.
    bound = 0.0 if subject.model.adapter is None else subject.bounds[0]
    return Finding("saving", "the model before saving and after loading", value, bound, control)


def check_adapter(subject: Subject) -> Finding:
    """Return the check "adapter": the difference of log-probs between a new adapter, a disabled one, and none."""
    base = replace(subject.config.model, lora_rank=0, adapter="merge")
    plain = replace(subject, model=load_model(base, subject.config.run, None)).logp(subject.groups)
    lora = model_source.lora_of(subject.config.model) or FRESH
    wanted = replace(base, lora_rank=lora.rank, lora_alpha=lora.alpha, lora_target_modules=tuple(lora.target_modules))
    adapted = replace(subject, model=load_model(wanted, subject.config.run, None))
    fresh = _apart(plain, adapted.logp(subject.groups))
    with _changed(adapted.model):
        on = _apart(plain, adapted.logp(subject.groups))
        with adapted.model.without_adapter():
            off = _apart(plain, adapted.logp(subject.groups))
    note = "" if subject.config.model.lora_rank else f"of rank {lora.rank}, only for this check"
    return Finding("adapter", "a new adapter, a disabled one, and none", max(fresh, off), subject.bounds[0], on, note=note)


Gradient = dict[str, Tensor]
# The numbers of processes that the check simulates.
RANKS = (2, 3)


def _algorithm(config: OnlineConfig) -> PolicyGradient:
    """Return the run's algorithm if it trains on rewards without a critic or a reference, else DAPO without its filters."""
    algorithm = method(config)
    usable = isinstance(algorithm, PolicyGradient) and not (algorithm.needs_critic or algorithm.needs_reference)
    if not usable or not isinstance(algorithm, PolicyGradient) or not algorithm.needs_reward:
        algorithm = replace(DAPO, name="")
    # Without a baseline: if completions are similar, terms around their mean cancel, and only rounding remains.
    return replace(algorithm, psi=total_return(), keep=(), correction=None)


class _Step:
    """A training step on the subject's completions, whose gradient can be computed in any number of micro-batches."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.algorithm = subject, _algorithm(subject.config)
        scored = [  # rewards by length are positive, differ within a group, and need no reward function
            [replace(t, reward=float(1 + (7 * k + len(t.completion.ids)) % 5), status="scored") for k, t in enumerate(group)]
            for group in subject.trajectories
        ]
        self.batch = to_batch(scored)
        self.prepared = self.algorithm.prepare(self.batch, self.algorithm.initial_state())
        self.optimizer = Optimizer(subject.model.trainable(), subject.config.optim)
        self.whole = self.algorithm.totals(self.prepared)

    def parts(self, budget: int, ranks: int = 1) -> list[MicroBatch]:
        """Return micro-batches of at most `budget` tokens, with equal numbers for each of `ranks` processes if possible."""
        return micro_batches(self.batch, self.prepared.needs_gradient, budget, ranks)

    def totals(self, parts: Sequence[MicroBatch]) -> Totals:
        """Return the totals (numbers of tokens and rows) by which the loss is divided if these are all parts."""
        return self.algorithm.totals(self.prepared, torch.cat([rows_of(part) for part in parts]))

    def gradient(self, parts: Sequence[MicroBatch], totals: Callable[[MicroBatch], Totals], scale: float = 1.0) -> Gradient:
        """Return parameter -> gradient, summed over the parts. `totals` gives the totals with which a part's loss is computed."""
        add_up([self.optimizer], [partial(self._loss, part, totals(part), scale) for part in parts])
        weights = self.optimizer.weights.items()
        found = {name: g.detach().float().clone() for name, w in weights if (g := w.gradient) is not None}
        self.optimizer.clear()
        return found

    def _loss(self, part: MicroBatch, totals: Totals, scale: float) -> Tensor:
        temperature, entropy = self.subject.params.temperature, self.algorithm.needs_entropy
        evaluation = self.subject.model.evaluate(inputs_of(self.batch, part), temperature=temperature, entropy=entropy)
        rows = self.prepared.select(rows_of(part)).to(self.subject.model.device)
        share = self.algorithm.loss(rows, outputs_by_row(evaluation, self.batch, part), totals, self.prepared.state)
        return share.value * scale


def check_micro_batches(subject: Subject) -> Finding:
    """Return the check "micro-batches": the difference between the gradients of one pass and of many."""
    step = _Step(subject)
    one = step.gradient(step.parts(1 << 30), lambda part: step.whole)
    longest = max(len(p) + len(c) for p, c in subject.alone)
    value = max(steepest(step.gradient(step.parts(budget), lambda part: step.whole), one) for budget in (longest, 2 * longest))
    many = step.parts(longest)
    control = steepest(step.gradient(many, lambda part: step.totals([part]), 1 / len(many)), one)
    return Finding("micro-batches", "gradients of one pass and of many", value, subject.bounds[1], control)


def check_processes(subject: Subject) -> Finding:
    """Return the check "processes": the difference between the gradients of one process and the sum over many."""
    step = _Step(subject)
    one = step.gradient(step.parts(1 << 30), lambda part: step.whole)
    value, control = 0.0, 0.0
    for ranks in RANKS:
        shares = [step.parts(1, ranks)[rank::ranks] for rank in range(ranks)]
        summed = _sum([step.gradient(share, lambda part: step.whole) for share in shares if share])
        # The planted fault: the mean over processes, the default of data parallelism, of sums that are already divided by the
        # totals.
        mean = {name: part / ranks for name, part in summed.items()}
        value, control = max(value, steepest(summed, one)), max(control, steepest(mean, one))
    return Finding("processes", "gradients of one process and of the sum over many", value, subject.bounds[1], control)


def _sum(parts: Sequence[Gradient]) -> Gradient:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.stack([part[name] for part in parts if name in part]).sum(0) for name in names}


def steepest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the greatest relative difference of a parameter's gradient in `a` and `b`.

    It is relative to the norm of that gradient, or to 0.1 % of the total norm if this is larger.
    """
    if a.keys() != b.keys():
        return float("inf")
    least = 1e-3 * float(torch.stack([g.double().norm() for g in b.values()]).norm())
    return max(float((a[n].double() - g.double()).norm() / g.double().norm().clamp(min=least)) for n, g in b.items())
