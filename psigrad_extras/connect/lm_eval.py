"""lm-eval's tasks on psigrad's models: log-likelihoods by packed forward passes, answers by the sampling engine.

`lm_eval` knows the model class below as "psigrad" once this module is imported:

    import lm_eval, psigrad_extras.connect.lm_eval
    lm_eval.simple_evaluate(model="psigrad", model_args={"pretrained": "runs/grpo/model"}, tasks=["piqa"])
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lm_eval import evaluator, utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from psigrad import redaction, seeds
from psigrad.config import LmEvalConfig, Model, Run, Sampling
from psigrad.errors import UserError, nearest, reason_of
from psigrad.language.data.chat.turns import Conversation
from psigrad.language.data.dataset_rows import Row
from psigrad.language.loading import samplers
from psigrad.language.loading.load_model import configure_chat, load_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Ids
from psigrad.language.rollout.types import SamplingParams
from psigrad.paths import check_output
from psigrad.records.checkpoint import MANIFEST
from psigrad.runs import machine
from psigrad_extras.connect.likelihood import EVERYDAY, likelihoods
from psigrad_extras.connect.task_metrics import TaskMetric, metrics_of
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.writer import Writer

EVERYDAY_TASK: dict[str, Any] = {
    "task": "everyday",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(EVERYDAY)}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{query}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1},
}
_ROOM = 256
"""The maximum number of tokens of an answer if the task sets no limit, as in lm-eval's `hf`."""
_SAMPLED = {"do_sample", "temperature", "top_p", "top_k", "min_p"}


@register_model("psigrad")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model class for lm-eval, on a `LanguageModel` or a model's name. It computes the same as lm-eval's class `hf`."""

    def __init__(
        self,
        pretrained: str | LanguageModel,
        *,
        dtype: str = "float32",
        device: str | None = None,
        micro_batch_tokens: int = 4096,
        max_decode_batch: int = 256,
        seed: int = 0,
        threads: int = 0,
        trust_remote_code: bool = False,
        chat_template_kwargs: str | dict[str, Any] = "",
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        """Load the model. lm-eval's `batch_size` and `max_batch_size` are ignored: batches are filled to `micro_batch_tokens`."""
        super().__init__()
        if isinstance(pretrained, LanguageModel):
            self.model = pretrained
        else:
            run = Run(device=device or "auto", threads=threads, seed=seed)
            machine.prepare_torch(run)
            settings = Model(pretrained, dtype=dtype, trust_remote_code=trust_remote_code, adapter="merge")  # type: ignore[arg-type]
            settings = replace(settings, chat_template_kwargs=chat_template_kwargs)
            self.model = load_model(settings, run, None)
            for manifest in sorted(Path(pretrained).parent.glob(f"checkpoints/*/{MANIFEST}"))[:1]:  # a run's model has its date
                configure_chat(self.model.tokenizer, settings, manifest.parent, self.model.network)
        self.tokenizer = self.model.tokenizer
        self.sampler = samplers.make(Sampling(max_decode_batch=max_decode_batch), self.model)
        self.budget, self.seed, self.max_batch = micro_batch_tokens, seed, max_decode_batch
        self._device = self.model.device

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that takes the place of an empty context."""
        bos = self.tokenizer.bos_token_id
        return int(bos) if bos is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, which lm-eval uses in the keys of its request cache."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def max_length(self) -> int:
        """The number of positions of the model."""
        return self.model.max_length

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as a prompt. If the last message is from the assistant, generation continues that message."""
        return Conversation(self.tokenizer, Row("a question of lm-eval")).prompt(chat_history)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text. No special tokens are added if the text already starts with the BOS token."""
        if add_special_tokens is None and has_bos_prefix(string, str(self.tokenizer.decode([self.prefix_token_id]))):
            add_special_tokens = False
        asked = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, verbose=False, **asked)["input_ids"])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Return (log p, True if greedy) for each (…, context ids, continuation ids).

        A context that is too long loses its start.
        """
        asked: list[tuple[Ids, Ids]] = []
        for _pair, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"A task continues with {len(continuation)} tokens, more than the model's {self.max_length} positions; "
                    "remove the task, or give a model with more positions."
                )
            asked.append((context[-(self.max_length + 1 - len(continuation)) :], continuation))
        found = [(one.logp, one.greedy) for one in likelihoods(self.model, asked, self.budget)]
        for request, answer in zip(requests, found, strict=True):
            if (pair := request[0]) is not None:
                self.cache_hook.add_partial("loglikelihood", pair, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log p of each full text, which is evaluated in windows of the model's context length."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            asked = [(None, *utils.make_disjoint_window(window)) for window in windows]
            found.append(sum(logp for logp, _ in self._loglikelihood_tokens(asked)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return an answer to each request, up to its first stop string.

        All are decoded in one batch, even if settings differ.
        """

        async def answers() -> list[str]:
            with contextlib.closing(SamplingEngine(self.model, self.max_batch, self.sampler)) as engine:
                return await asyncio.gather(*(self._answer(engine, i, request.args) for i, request in enumerate(requests)))

        with ThreadPoolExecutor(1) as thread:  # in a notebook, this thread already runs an event loop
            return thread.submit(asyncio.run, answers()).result()

    async def _answer(self, engine: SamplingEngine, place: int, asked: tuple[str, dict[str, Any]]) -> str:
        wanted = normalize_gen_kwargs(asked[1], _ROOM)
        until = handle_stop_sequences(wanted["until"], eos=str(self.tokenizer.decode([self.eot_token_id])))
        params = self._params(dict(wanted))
        room = self.max_length - params.max_tokens
        if room < 1:
            raise UserError(
                f"A task generates up to {params.max_tokens} tokens, which leaves no room for a prompt in the model's "
                f"{self.max_length} positions; remove the task, or give a model with more positions."
            )
        stream = engine.submit(self.tok_encode(asked[0])[-room:], params, seeds.derive(self.seed, "lm-eval", place))
        count = await stream.write(Writer(self.tokenizer, [stop for stop in until if stop]))
        ids = [token.id for token in stream.tokens[:count]]
        written = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text = _cut(str(written), until)  # decoded as lm-eval does it
        self.cache_hook.add_partial("generate_until", asked, text)
        return text

    def _params(self, wanted: Mapping[str, Any]) -> SamplingParams:
        """Return a task's generation settings as sampling parameters. Raises `UserError` for unknown ones."""
        unknown = sorted(set(wanted) - _SAMPLED - {"until", "max_gen_toks"})
        if unknown:
            raise UserError(
                f"The task sets {', '.join(unknown)}, which psigrad's sampler does not support; expected "
                f"{', '.join(sorted(_SAMPLED))}."
            )
        sampled = bool(wanted.get("do_sample"))
        return SamplingParams(
            int(wanted["max_gen_toks"]),
            temperature=float(wanted.get("temperature", 1.0)) if sampled else 0.0,
            top_p=float(wanted.get("top_p", 1.0)) if sampled else 1.0,
            top_k=int(wanted.get("top_k", 0)) if sampled else 0,
            min_p=float(wanted.get("min_p", 0.0)) if sampled else 0.0,
        )


def _cut(text: str, until: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return min((text.split(stop)[0] for stop in until if stop), key=len, default=text)


@dataclass(frozen=True)
class LmEvalResult:
    """The result of `run`. `raw` is lm-eval's output for each model, by name."""

    metrics: tuple[TaskMetric, ...]
    raw: dict[str, Any]


def run(config: LmEvalConfig) -> LmEvalResult:
    """Evaluate the model, and the baseline if there is one, on the same documents.

    Raises `UserError` for unknown tasks, for data that cannot be loaded, and for an output that cannot be written.
    """
    if not config.model or not config.tasks:
        missing = "model (--model)" if not config.model else "task (--tasks), such as everyday"
        raise UserError(f"No {missing} was given; type for example `psigrad lm-eval --model runs/grpo/model --tasks everyday`.")
    check_output(config.output)
    manager = _manager(config)
    tasks = [_task(name, manager) for name in config.tasks]
    names = [config.model, *([config.baseline] if config.baseline else [])]
    raw = {name: _evaluated(config, name, tasks, manager) for name in names}
    result = LmEvalResult(tuple(metrics_of(*(raw[name] for name in names))), raw)
    if config.output:
        content = {"settings": redaction.clear(asdict(config)), "metrics": [asdict(one) for one in result.metrics], "raw": raw}
        Path(config.output).write_text(json.dumps(content, default=str, ensure_ascii=False) + "\n")
    return result


def _manager(config: LmEvalConfig) -> TaskManager:
    """Return lm-eval's task manager. Its own tasks are ten thousand files, which are read only if one of them is named."""
    own = TaskManager(include_path=config.include_path or None, include_defaults=False)
    named = [name for name in config.tasks if name != EVERYDAY_TASK["task"] and not _is_file(name)]
    return own if all(own.match_tasks([name]) for name in named) else TaskManager(include_path=config.include_path or None)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _task(name: str, manager: TaskManager) -> Any:
    """Return a task as lm-eval expects it: its name, or the settings in the user's file."""
    if name == EVERYDAY_TASK["task"]:
        return EVERYDAY_TASK
    if _is_file(name):
        if not Path(name).is_file():
            raise UserError(f"There is no task file {name!r}; give a YAML file of lm-eval, or the name of a task.")
        return str(Path(name).absolute())
    if not manager.match_tasks([name]):
        known = [EVERYDAY_TASK["task"], *manager.all_tasks]
        raise UserError(f"lm-eval has no task {name!r}{nearest(name, known) or '; `lm_eval ls tasks` lists them.'}")
    return name


def _evaluated(config: LmEvalConfig, name: str, tasks: Sequence[Any], manager: TaskManager) -> dict[str, Any]:
    model = HarnessModel(
        name,
        dtype=config.dtype,
        device=config.device,
        micro_batch_tokens=config.micro_batch_tokens,
        max_decode_batch=config.max_decode_batch,
        seed=config.seed,
        threads=config.threads,
        trust_remote_code=config.trust_remote_code,
        chat_template_kwargs=config.chat_template_kwargs,
    )
    try:
        found = evaluator.simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=config.num_fewshot or None,
            limit=config.limit or None,
            apply_chat_template=config.apply_chat_template,
            task_manager=manager,
            bootstrap_iters=0,
            random_seed=config.seed,
            fewshot_random_seed=config.seed,
            log_samples=True,
        )
    except (OSError, ConnectionError) as error:
        raise UserError(
            f"The data of {', '.join(config.tasks)} could not be loaded ({reason_of(error)}); check the network or the files."
        ) from error
    return {key: found[key] for key in ("results", "samples", "versions", "n-samples")}
