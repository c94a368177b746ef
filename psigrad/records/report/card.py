"""The model card: README.md of a run's model, with the facts that readers of a hub repository need."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import metadata_load, try_to_load_from_cache

from psigrad import __version__
from psigrad.config.fields import FREE, MACHINE, find_marked
from psigrad.config.nested import put
from psigrad.records.read import RunData, auto_class, kind_of, load, show_interval, show_number
from psigrad.records.report.facts import describe_method, facts, format_time, overrides, settings_class
from psigrad.records.report.html import environment
from psigrad.records.report.verdict import verdict
from psigrad.records.rows import number, parse_row

# A name on the hub: user/name, or one of the few without a user.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".gguf")
_COMMIT = 40  # characters of a commit, which pins a hub model; a folder's pin has 64


class ModelOrigin(NamedTuple):
    """The base model of a trained model: its name, its hub name and licence if known, and its pin (commit or hash)."""

    name: str
    on_hub: str
    license: str
    pin: str


def text(folder: str | Path, repository: str = "") -> str:
    """Return the text of README.md for the model in a run folder.

    `repository` is the hub repository to which the model will be uploaded; "" if it stays on this machine.
    """
    run = load(folder)
    pins, base, name = _pins(run), _base(run), repository.rpartition("/")[2] or run.path.resolve().name
    command = str(_start(run).get("command") or "")
    last = (run.evaluations or [{}])[-1]
    template = environment(autoescape=False).get_template("card.md")
    card = template.render(
        front=_yaml(_front(run, base, name)),
        name=name,
        trained=_trained(run, base),
        version=_version(run),
        verdict=verdict(run),
        held_out=_held_out_table(run),
        prompts=show_number(last["eval/prompts"]) if "eval/prompts" in last else "",
        auto=_auto(run),
        place=repository or f"{run.settings.get('run.output_dir') or run.path.resolve().name}/model",
        adapter_beside=repository and (run.path / "model" / "adapter").is_dir(),
        facts=_facts(run, base, pins),
        command=command if command.startswith(("psigrad ", "python ")) else "",
        method=method_of(run),
        settings=_yaml(_settings(run), width=110),
    )
    card = f"{card}\n".encode("utf-8", "backslashreplace").decode()  # a file's name can be invalid text
    return _publish(card, run) if repository else card


def _auto(run: RunData) -> str:
    """Return the name of the transformers class that loads the model; "" for a reward model with images, which no class loads."""
    found = auto_class(run.path / "model")
    return "" if kind_of(run.config) == "reward" and found == "AutoModelForImageTextToText" else found


def _yaml(value: Any, **layout: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, **layout))


def method_of(run: RunData) -> str:
    """Return the name of the run's method, which is also its command: grpo, dpo, sft, reward and so on."""
    kind = kind_of(run.config)
    if kind in ("sft", "reward"):
        return kind
    given = run.config.get("algorithm" if kind == "online" else "loss", "")
    name = given.get("preset") or given.get("name") or "" if isinstance(given, Mapping) else given
    return str(name)


def _front(run: RunData, base: ModelOrigin, name: str) -> dict[str, Any]:
    """Return the metadata that the hub reads, for the first lines of the card. `name` is the model's name."""
    reward = kind_of(run.config) == "reward"
    adapter = not (run.path / "model" / "config.json").exists() and (run.path / "model" / "adapter_config.json").exists()
    sees = auto_class(run.path / "model") == "AutoModelForImageTextToText"
    task = "text-classification" if reward else "image-text-to-text" if sees else "text-generation"
    tags = ["psigrad", *(["reward-model"] if reward else []), method_of(run)]
    data = list(dict.fromkeys(on_hub for _, on_hub in _datasets(run) if on_hub))
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": task,
        "license": base.license,
        "base_model": base.on_hub,
        "base_model_relation": ("adapter" if adapter else "finetune") if base.on_hub else "",
        "datasets": data,
        "tags": [tag for tag in dict.fromkeys(tags) if re.fullmatch(r"[\w.-]+", tag)],
        "model-index": _index(run, name, task),
    }
    return {key: value for key, value in front.items() if value}


def _index(run: RunData, name: str, task: str) -> list[dict[str, Any]]:
    """Return the hub's `model-index` for the model `name`: its held-out metrics after training. `task` is its pipeline tag."""
    last = (run.evaluations or [{}])[-1]
    metrics = [
        {"name": f"held-out {stem}", "type": stem, "value": value}
        for stem, key in _held_out_figures(run)
        if stem != "kl" and math.isfinite(value := number(last.get(key)))
    ]
    if not metrics:
        return []
    held, on_hub = next(_datasets(run, "eval_"), next(_datasets(run), ("held-out rows", "")))
    data = {"name": held, "type": on_hub or re.sub(r"[^\w.-]+", "-", held).strip("-") or "rows"}
    return [{"name": name, "results": [{"task": {"type": task}, "dataset": data, "metrics": metrics}]}]


def _held_out_figures(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield (name, key in metrics.jsonl) for each held-out metric that is a mean, has an interval, or is the loss."""
    keys = run.keys("eval/")
    for key in keys:
        stem = key.removesuffix("/mean")
        if key.endswith("/mean") or f"{stem}/low" in keys or key == "eval/loss":
            yield stem.removeprefix("eval/"), key


def _held_out_table(run: RunData) -> list[list[str]]:
    """Return the rows of a Markdown table of the held-out metrics before and after training, with 95 % intervals."""
    rows = run.evaluations
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    ends = [("before", first), ("after", last)] if len(rows) > 1 else [("after", last)]
    head = ["held-out", *(f"{when} (step {show_number(row['step'])})" for when, row in ends)]
    lines = [[name, *(_with_interval(row, key) for _, row in ends)] for name, key in _held_out_figures(run) if key in last]
    return [head, ["---"] * len(head), *lines]


def _with_interval(row: Mapping[str, Any], key: str) -> str:
    stem = key.removesuffix("/mean")
    low, high = number(row.get(f"{stem}/low")), number(row.get(f"{stem}/high"))
    return show_interval(row.get(key), low, high)


def _trained(run: RunData, base: ModelOrigin) -> str:
    size = describe_method(run).rpartition(": ")[2]
    of = f"[{base.name}](https://huggingface.co/{base.on_hub})" if base.on_hub == base.name else f"`{base.name}`"
    name = method_of(run)
    what = {"reward": "A reward model", "sft": "Supervised fine-tuning"}.get(name, f"`{name}`" if name else "Training")
    return f"{what} on {of} ({size})" if base.name else f"{what} ({size})"


def _facts(run: RunData, base: ModelOrigin, pins: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) for the base model, data, rewards, times and machine of the training. For `pins` see `_pins`."""
    start = _start(run)
    data = ", ".join(f"[{name}](https://huggingface.co/datasets/{hub})" if hub else f"`{name}`" for name, hub in _datasets(run))
    rows = number(start.get("rows"))
    count = f"{show_number(rows)} rows" + (
        f" and {show_number(held)} held out" if (held := number(start.get("eval_rows"))) > 0 else ""
    )
    digest = f"SHA-256 of the rows {pins['dataset']}" if pins.get("dataset") else ""
    config = run.config
    rewards = [_name_reward(one) for key in ("reward", "reward_model") for one in config.get(key) or ()]
    metric = run.settings.get("evaluation.metric")
    known = "" if not base.pin else f" (commit {base.pin})" if len(base.pin) == _COMMIT else f" (SHA-256 of its files {base.pin})"
    around = dict(facts(run))
    licence = f"{base.license}, that of the base model" if base.license else ""
    lines = [
        ("base model", f"`{base.name}`{known}" if base.name else ""),
        ("licence", licence),
        ("adapter", f"LoRA of rank {rank}" if (rank := run.settings.get("model.lora_rank")) else ""),
        ("data", "; ".join(filter(None, [data, count if math.isfinite(rows) else "", digest]))),
        ("reward" if kind_of(config) == "online" else "evaluated by", ", ".join(f"`{name}`" for name in rewards)),
        ("held-out metric", f"`{_name_reward(metric)}`" if metric else ""),
        ("finished", format_time(number(run.last_event("finished").get("time")))),
        ("took", around.get("Took", "")),
        ("on", around.get("On", "")),
        ("with", around.get("With", "")),
    ]
    return [(name, text) for name, text in lines if text]


def _name_reward(reward: Any) -> str:
    if isinstance(reward, Mapping):
        rest = ", ".join(f"{key}={value}" for key, value in reward.items() if key != "reward")
        return f"{reward.get('reward', '')}({rest})"
    return str(reward)


def _settings(run: RunData) -> dict[str, Any]:
    """Return the settings that differ from the defaults. Omit those that are marked as `FREE` or `MACHINE`."""
    cls, found = settings_class(run.config), dict[str, Any]()
    of_here = {name for mark in (FREE, MACHINE) for name in find_marked(cls, mark)}
    for name, value in overrides(run).items():
        if name not in of_here:
            put(found, name, value, "the run's settings")
    return found


def _base(run: RunData) -> ModelOrigin:
    """Return the base model of the training. For a local folder, take the hub name from `base_model` in its model card."""
    name = str(run.settings.get("model.path") or "")
    pin, local = str(_pins(run).get("model") or ""), Path(name)
    if name and (len(pin) == _COMMIT or (not pin and not local.exists() and _HUB_NAME.fullmatch(name))):
        cached = try_to_load_from_cache(name, "README.md", revision=pin or None)
        held = _metadata(Path(cached)) if isinstance(cached, str) else {}
        return ModelOrigin(name, name, str(held.get("license") or ""), pin)
    of_run = local / "model" / "README.md"
    held = _metadata(of_run if of_run.is_file() else local / "README.md") if name else {}
    above = held.get("base_model")
    above = above[0] if isinstance(above, list) and above else above
    return ModelOrigin(name, str(above or ""), str(held.get("license") or ""), pin)


def _metadata(card: Path) -> dict[str, Any]:
    try:
        return metadata_load(card) or {} if card.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError):  # a card that a user broke
        return {}


def _datasets(run: RunData, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (entry, hub name) for each entry of the setting data.<prefix>dataset; the hub name is "" for data not on the hub."""
    given = run.settings.get(f"data.{prefix}dataset") or []
    for one in given if isinstance(given, list) else [given]:
        name = str(one).partition(":")[0]
        elsewhere = name in ("task", "rows") or name.endswith(_FILES) or Path(name).exists()
        yield str(one), "" if elsewhere or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) else name


def _start(run: RunData) -> Mapping[str, Any]:
    return run.starts[0] if run.starts else {}


def _version(run: RunData) -> str:
    """Return the version of psigrad that trained the model; the installed version if it was not recorded."""
    versions = (_start(run).get("machine") or {}).get("versions") or {}
    return str(versions.get("psigrad") or __version__)


def _pins(run: RunData) -> Mapping[str, Any]:
    """Return the newest checkpoint's manifest, which has the hashes of the base model and the data; {} without a checkpoint."""
    newest = max(run.path.glob("checkpoints/step-*/manifest.json"), default=None)
    return (parse_row(newest.read_bytes()) if newest is not None else None) or {}


def _publish(card: str, run: RunData) -> str:
    """Remove private paths from `card`: shorten absolute paths in settings to their last part, and the home folder to ~."""
    leaves = [leaf for value in run.settings.values() for leaf in (value if isinstance(value, list) else [value])]
    for path in sorted((leaf for leaf in leaves if isinstance(leaf, str) and leaf.startswith("/")), key=len, reverse=True):
        card = card.replace(path, Path(path).name)
    return card.replace(f"{Path.home()}/", "~/")
