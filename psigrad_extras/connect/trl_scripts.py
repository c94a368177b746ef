"""Reading the settings of a TRL script, or of a file for TRL's command line, from the source without running it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psigrad.compat.conversion import Conversion
from psigrad.compat.foreign_names import load
from psigrad.compat.translate import is_known
from psigrad.compat.trl import AGGREGATES, DEFAULTS, METHODS
from psigrad.config import algorithms
from psigrad.config.methods import declaration
from psigrad.config.nested import names_of, read_file
from psigrad.errors import UserError, nearest
from psigrad_extras.connect.trl_trainers import TrlScript, Unevaluated, convert

_SIGNS: dict[type[ast.operator], Any] = {
    ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.Add: operator.add,
    ast.Sub: operator.sub,
}  # fmt: skip
_TRAINERS = {f"{name.removesuffix('Config')}Trainer": name for name in METHODS}
_COMMANDS = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig",
             "reward": "RewardConfig", "ppo": "PPOConfig", "online_dpo": "OnlineDPOConfig", "orpo": "ORPOConfig",
             "cpo": "CPOConfig", "distillation": "DistillationConfig"}  # fmt: skip


def convert_file(path: str, trainer: str = "") -> Conversion:
    """Return the settings that train as a TRL script or a file of its command line does. `trainer` is as for `read`.

    Values that a setting does not accept are reported and dropped. Raises `UserError` for fields that TRL does not have.
    """
    script = read(path, trainer)
    _check_fields(script)
    made = convert(script)
    settings = METHODS[script.config][1]
    for name in [name for name in made.settings if name in names_of(settings)]:
        try:
            load(settings, flags={name: made.settings[name]})
        except UserError as error:
            made.no_equal.append(str(error))
            del made.settings[name]
    config: Any = load(settings, flags={**declaration(made.method).defaults, **made.settings})
    if hasattr(config, "algorithm"):
        algorithms.resolve_online(config.algorithm)
    elif hasattr(config, "loss"):
        algorithms.resolve_loss(config.loss)
    return made


def read(path: str, trainer: str = "") -> TrlScript:
    """Read a Python script, or a YAML file of TRL's command line. `trainer` ("grpo") is needed if the file does not show it.

    Raises `UserError` if nothing of TRL is found.
    """
    if trainer and trainer not in _COMMANDS:
        raise UserError(f"There is no trainer {trainer!r}; expected one of {', '.join(_COMMANDS)}{nearest(trainer, _COMMANDS)}")
    if Path(path).suffix != ".py":
        return _of_file(path, _COMMANDS.get(trainer, ""))
    try:
        tree = ast.parse(Path(path).read_text())
    except OSError as error:
        raise UserError(f"The script {path!r} cannot be read: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise UserError(f"The script {path!r} is not Python: {error}.") from error
    return _Script(path, tree).read(_COMMANDS.get(trainer, ""))


def _of_file(path: str, config: str) -> TrlScript:
    values = read_file(path)
    if "compute_environment" in values or "distributed_type" in values:
        processes = values.get("num_processes") or 1
        shards = " --strategy fsdp" if str(values.get("distributed_type")) in ("FSDP", "DEEPSPEED") else ""
        raise UserError(
            f"{path} is a configuration of accelerate; give the script or the YAML file of TRL. psigrad starts the "
            f"processes itself with --processes {processes}{shards}."
        )
    config = config or _name_config(values, path)
    found = TrlScript(config)
    if "datasets" in values:
        mixed = values.pop("datasets")
        if isinstance(mixed, list) and len(mixed) == 1 and isinstance(mixed[0], Mapping):
            values |= {"dataset_name": mixed[0].get("path"), "dataset_config": mixed[0].get("name")}
        else:
            found.look_at.append(f"datasets: {len(mixed)} datasets are mixed; give them as dataset=[a.jsonl:0.7, b.jsonl:0.3].")
    adapter = [name for name in values if name.startswith("lora_") or name in ("use_rslora", "use_dora")]
    if adapter and not values.get("use_peft"):
        found.look_at.append(f"{', '.join(adapter)}: TRL ignores these fields without use_peft, so they are not converted.")
        values = {name: value for name, value in values.items() if name not in adapter}
    found.values = values
    return found


def _name_config(values: Mapping[str, Any], path: str) -> str:
    """Return the name of TRL's configuration class that has the fields of a file."""
    own = {"GRPOConfig": ("epsilon", "scale_rewards", "importance_sampling_level"), "RLOOConfig": ("normalize_advantages",),
           "SFTConfig": ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"),
           "RewardConfig": ("center_rewards_coefficient",), "KTOConfig": ("desirable_weight", "undesirable_weight"),
           "DPOConfig": ("precompute_ref_log_probs", "f_divergence_type", "loss_weights")}  # fmt: skip
    told = [name for name, fields in own.items() if any(f in values for f in fields)]
    told = told or ["GRPOConfig"] * (values.get("loss_type") in [*AGGREGATES])
    if len(told) != 1:
        raise UserError(f"{path} does not say which trainer it is for; add --trainer grpo, sft, dpo, reward, rloo or kto.")
    return told[0]


class _Script:
    """The assignments and calls of a script."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.assigned: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.assigned.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.assigned.setdefault(node.target.id, node.value)
        self.functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        self.imported = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }

    def read(self, config: str) -> TrlScript:
        """Return the arguments of the call of the trainer and of its configuration class `config`."""
        trainers = [call for call in self.calls if _name(call) in _TRAINERS]
        configs = [call for call in self.calls if _name(call) in METHODS]
        if not (trainers or configs):
            raise UserError(f"{self.path} uses none of TRL's configurations ({', '.join(METHODS)}); give a script that does.")
        made = TrlScript(config or (_name(configs[0]) if configs else _TRAINERS[_name(trainers[0])]))
        if len(configs) > 1 or len(trainers) > 1:
            made.look_at.append("The script creates several trainers or configurations; only the first is converted.")
        if configs:
            made.values = self._keywords(configs[0], made)
        else:
            made.look_at.append(
                "The script's configuration comes from its command line; convert its YAML file, or add the options of your "
                "command."
            )
        for call in trainers[:1]:
            made.trainer = {
                word.arg: self._read_argument(word.arg, word.value) for word in call.keywords if word.arg and word.arg != "args"
            }
            if call.args:
                made.trainer.setdefault("model", self._read_argument("model", call.args[0]))
        adapters = [call for call in self.calls if _name(call) == "LoraConfig"]
        if adapters:
            made.lora = self._keywords(adapters[0], made)
        made.trainer.pop("peft_config", None)
        return made

    def _keywords(self, call: ast.Call, made: TrlScript) -> dict[str, Any]:
        values = {}
        for word in call.keywords:
            if word.arg is None:
                made.look_at.append(f"{_name(call)}(**{ast.unparse(word.value)}): its settings are unknown; add them yourself.")
                continue
            value = self._value(word.value)
            if isinstance(value, Unevaluated):
                made.look_at.append(f"{word.arg} = {value}: the value is known only when the script runs; add the setting.")
            else:
                values[word.arg] = value
        return values

    def _value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression, or its source as `Unevaluated` if that is known only when the script runs."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            pass
        if isinstance(node, ast.Name) and node.id in self.assigned and depth < 8:
            return self._value(self.assigned[node.id], depth + 1)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            return node.attr
        if isinstance(node, ast.List | ast.Tuple):
            parts = [self._value(part, depth) for part in node.elts]
            if not any(isinstance(part, Unevaluated) for part in parts):
                return parts
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv | ast.Div | ast.Add | ast.Sub):
            left, right = self._value(node.left, depth), self._value(node.right, depth)
            if all(isinstance(side, int | float) for side in (left, right)):
                return _SIGNS[type(node.op)](left, right)
        if isinstance(node, ast.JoinedStr):
            parts = [self._value(v.value if isinstance(v, ast.FormattedValue) else v, depth) for v in node.values]
            if not any(isinstance(part, Unevaluated) for part in parts):
                return "".join(map(str, parts))
        return Unevaluated(ast.unparse(node))

    def _read_argument(self, name: str, node: ast.expr) -> Any:
        """Return the value of a trainer's argument. Models and datasets become their names, functions become module:function."""
        if name in ("reward_funcs", "tools", "environment_factory"):
            several = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
            return [self._function(part) for part in several]
        value = self._value(node)
        return self._read_loading(node) if isinstance(value, Unevaluated) else value

    def _function(self, node: ast.expr) -> Any:
        name = node.id if isinstance(node, ast.Name) else ""
        return f"{self.path}:{name}" if name in self.functions else self.imported.get(name) or self._value(node)

    def _read_loading(self, node: ast.expr) -> Any:
        """Return the name in from_pretrained("name", …) or load_dataset("name", "config", split="train"), and other arguments."""
        for _ in range(8):
            if isinstance(node, ast.Name) and node.id in self.assigned:
                node = self.assigned[node.id]
            elif isinstance(node, ast.Subscript) and isinstance(self._value(node.slice), str):
                inner, which = self._read_loading(node.value), self._value(node.slice)
                of_it = "part" if isinstance(inner, dict) and "part" in inner else "split"
                return {**inner, of_it: which} if isinstance(inner, dict) else Unevaluated(ast.unparse(node))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "shuffle":
                node = node.func.value  # a call of .shuffle() is skipped, since rows are shuffled in every epoch
            else:
                break
        if isinstance(node, ast.Call) and _name(node) == "from_pretrained" and node.args:
            return self._value(node.args[0])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "train_test_split":
            inner = self._read_loading(node.func.value)
            return {**inner, "part": ""} if isinstance(inner, dict) else Unevaluated(ast.unparse(node))
        if isinstance(node, ast.Call) and _name(node) == "load_dataset" and node.args:
            parts = [self._value(part) for part in node.args[:2]]
            words = {word.arg: self._value(word.value) for word in node.keywords}
            return {"dataset": parts[0], "config": parts[1] if len(parts) > 1 else words.get("name"), **words}
        return Unevaluated(ast.unparse(node))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""


def _check_fields(script: TrlScript) -> None:
    """Check that TRL 1.16 has the script's fields. Another field is kept if psigrad knows it, and else noted in `look_at`.

    Raises `UserError` if an unknown field is similar to an existing one, and so probably a typo.
    """
    for name in list(script.values):
        if is_known(name) or name in names_of(METHODS[script.config][1]):
            continue
        if hint := nearest(name, DEFAULTS[script.config]):
            raise UserError(f"{script.config} has no field {name!r}{hint}")
        script.look_at.append(f"{name}={script.values.pop(name)!r}: {script.config} of TRL 1.16 has no such field.")
