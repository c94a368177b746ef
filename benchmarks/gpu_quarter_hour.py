"""GPU measurements in 15 minutes: `python benchmarks/gpu_quarter_hour.py [STAGE …] [--minutes 12]` or `make gpu-quarter-hour`.

The most important stages come first. Each runs in a separate process with a time limit. Its figures are stored when it ends, or
when the limit ends it. The same command continues where the last one stopped. After each stage, the table in docs/gpu.md is
updated. `--tiny --device cpu` tries the script on a machine without a GPU, and writes to the folder for temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import resumable
from timed.workload import Workload, read_shape

sys.path.append(str(Path(__file__).parents[1] / "docs" / "make"))
from filled import fill

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "gpu_quarter_hour.jsonl", HERE.parent / "docs" / "gpu.md"
# Seconds left unused at the end, in which the results are returned.
SPARE = 15
Figures = dict[str, Any]
Note = Callable[[Figures], None]


@dataclass(frozen=True)
class Options:
    """The device on which the stages run, and True for tiny sizes."""

    device: str
    tiny: bool


@dataclass(frozen=True)
class Stage:
    """A measurement. `run(options, note)` passes its figures to `note` as it measures them. It starts if at least `least` seconds
    are left, and is ended after `most`.
    """

    name: str
    run: Callable[[Options, Note], None]
    least: int
    most: int


def work_of(tiny: bool, name: str, prompt: int, lora: int) -> Workload:
    """Return a GRPO step with 16 × 8 completions of 128 tokens, or with a few short ones for a tiny model."""
    sizes: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": 128, "micro_tokens": 16384, "steps": 3}
    if tiny:
        sizes |= {"prompt_tokens": prompt // 16, "completion_tokens": 6, "prompts": 2, "generations": 4, "steps": 1}
    whole = {"micro_batch": 8 if prompt > 1000 or lora else 32, "half_weights": lora > 0, "gradient_checkpointing": lora > 0}
    return Workload(f"{name} {prompt}", f"{name}, prompts of {prompt} tokens", lora_rank=lora, **sizes, **({} if tiny else whole))


SHAPES = ("0.6B", "4B")  # of Qwen3
TINY: Figures = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
TINY |= {"num_key_value_heads": 2, "head_dim": 16}


def config_of(options: Options, name: str, layers: int = 0) -> Any:
    """Return the configuration of a shape, or a tiny one of the same kind."""
    from transformers import AutoConfig

    sizes = read_shape(f"Qwen3-{name}") | (TINY if options.tiny else {}) | ({"num_hidden_layers": layers} if layers else {})
    return AutoConfig.for_model(**sizes | {"eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None})


def files(options: Options, shape: str, work: Workload, folder: Path) -> None:
    """Write the workload's model (created on the device in bfloat16), its tokenizer and its rows."""
    import torch
    from timed import inputs

    config = config_of(options, shape)
    made = inputs.tokenizer(config.vocab_size)
    with torch.device(options.device):
        inputs.write_model(config, made, folder, dtype=torch.bfloat16)
    if options.device != "cpu":
        torch.cuda.empty_cache()  # the compared processes need this memory
    inputs.write(work, made, folder)


def facts(options: Options, note: Note) -> None:
    """Record the machine and its packages. Then take one step of a tiny model, which shows at once if something is broken."""
    import torch
    from timed.timing import alone

    from psigrad.runs.machine import provenance

    there = {name: bool(find_spec(name)) for name in ("trl", "peft", "vllm", "triton", "flash_attn", "bitsandbytes", "pytest")}
    memory = torch.cuda.mem_get_info() if options.device != "cpu" else ()
    note({**provenance(options.device), "packages": there, "memory": memory})
    make = partial(files, Options(options.device, True), "0.6B")
    done = alone(work_of(True, "0.6B", 64, 0), "bfloat16", 2, make=make, device=options.device)
    note({"tiny_step": done["ours"]["seconds"], "first_step": done["to_first_step"]["ours"]})


def tests(folder: str, options: Options, note: Note) -> None:
    """Run the tests that need a GPU. Without a GPU, only collect them."""
    only = ["-m", "gpu", "--durations", "5"] if options.device != "cpu" else ["-m", "gpu", "--collect-only"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *only, folder]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    end = done.stdout[-4000:] if done.returncode else ""
    note({"status": done.returncode, "last": lines[-1:], "failed": failed, "end": end})


def kernels(options: Options, note: Note) -> None:
    """Measure a layer's kernels and seconds in a micro-batch: eager and compiled, with and without LoRA."""
    import torch
    from timed import inputs

    from psigrad.language.models import language_model
    from psigrad.language.models.fused.inductor import compile_layers
    from psigrad.language.models.lora import Lora
    from psigrad.language.models.packing import Groups

    length = 8 if options.tiny else 128
    groups = Groups([[3] * length] * 4, [[[4] * length] * 8] * 4)
    for lora in (False, True):
        for how in ("eager", "compiled"):
            found: list[dict[str, float]] = []
            for layers in (2, 4):
                torch.manual_seed(0)
                with torch.device(options.device):
                    network = inputs.model_of(config_of(options, "0.6B", layers), dtype=torch.bfloat16)
                adapter = Lora(16) if lora else None
                model = language_model.prepare(network, inputs.tokenizer(network.config.vocab_size), adapter)
                model.attend("auto")
                if how == "compiled":
                    begin = time.perf_counter()
                    compile_layers(model)
                    note({f"{lora=} compile": {"seconds": time.perf_counter() - begin, "why_not": model.why_uncompiled}})
                found.append(profiled(model, groups, options))
            each = {name: (found[1][name] - found[0][name]) / 2 for name in found[0]}
            note({f"{lora=} {how}": each, f"{lora=} {how} attends": model.attention_kernel, f"{lora=} slower": model.slow_reason})


def profiled(model: Any, groups: Any, options: Options) -> dict[str, float]:
    """Return the number of kernels of a micro-batch (forward and backward), the GPU's busy seconds, and the total seconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = options.device != "cpu"

    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            model.network.zero_grad()  # adding to a gradient would be one more kernel for each weight
            model.evaluate(groups).logp.sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / times

    run(3)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        run(1)
    events = [e for e in seen.events() if not on_gpu or str(e.device_type).endswith("CUDA")]
    busy = sum(getattr(e, "device_time_total", 0.0) for e in events) / 1e6
    return {"kernels": len(events), "busy": busy, "seconds": run(5)}


def beside_trl(shape: str, prompt: int, lora: int, options: Options, note: Note, vllm: bool = False) -> None:
    """Compare a step with TRL's (sampling with vLLM if `vllm`), and the peak with the plan. Without TRL, time psigrad alone."""
    from beside_trl import beside
    from plan import planned
    from timed.timing import alone

    from psigrad.errors import UserError
    from psigrad_extras.preflight import plan

    def make(work: Workload, folder: Path) -> None:
        files(options, shape, work, folder)
        made = planned(work, folder, "bfloat16", plan.machine(options.device, "bfloat16", measure=False))
        note({"planned_mb": made.memory.peak / 2**20, "planned_seconds": made.phases})

    work = replace(work_of(options.tiny, shape, prompt, lora), vllm=vllm)
    together: Figures = {"make": make, "device": options.device}
    apart = prompt > 1000  # one at a time, since together they take more than 140 GB
    if find_spec("trl") is None:
        note({"alone": alone(work, "bfloat16", 2, **together)})
        return
    taken: list[Figures] = []

    def keep(pair: Figures) -> None:
        taken.append(pair)
        note({"pairs": taken})

    try:
        note({"beside": beside(work, "bfloat16", 2, keep=keep, apart=apart, **together)})
    except UserError as error:  # for example if TRL does not run with the installed versions
        said = [line for line in str(error).splitlines() if "Error" in line] or [str(error)]
        note({"failed": [f"Not compared: {said[-1][:200]}"], "alone": alone(work, "bfloat16", 2, **together)})


def sampling(options: Options, note: Note) -> None:
    """Measure 128 completions of 128 tokens: with CUDA graphs, without, and with CUDA graphs and compiled layers."""
    import torch
    from timed import inputs

    from psigrad.language.models import language_model
    from psigrad.language.models.fused.inductor import compile_layers
    from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
    from psigrad.language.rollout.types import Request, SamplingParams

    torch.manual_seed(0)
    with torch.device(options.device):
        network = inputs.model_of(config_of(options, "0.6B"), dtype=torch.bfloat16)
    model = language_model.prepare(network, inputs.tokenizer(network.config.vocab_size))
    model.attend("auto")
    count, length = (2, 8) if options.tiny else (16, 128)
    params = SamplingParams(max_tokens=length)
    for prompt in (64, 2048):
        ids = tuple(2 + i % 60 for i in range(prompt // 32 if options.tiny else prompt))
        requests = [Request(ids, tuple(range(8 * i, 8 * i + 8))) for i in range(count)]
        for how in ("recorded", "eager", "compiled"):
            if how == "compiled":
                compile_layers(model)
            sampler = EmbeddedSampler(model, cuda_graphs=how != "eager")
            sampler.sample(requests, params)
            begin = time.perf_counter()
            done = sampler.sample(requests, params)
            seconds = time.perf_counter() - begin
            tokens = sum(len(c.ids) for group in done for c in group)
            note({f"{how} {prompt}": {"seconds": seconds, "tokens": tokens, "why_not": model.why_uncompiled}})
        for layer in network.model.layers:
            layer._compiled_call_impl = None


STAGES = (
    Stage("facts", facts, 20, 100),
    Stage("tests", partial(tests, "tests/gpu/test_gpu.py"), 60, 150),
    Stage("0.6B 64", partial(beside_trl, "0.6B", 64, 0), 60, 170),
    Stage("kernels", kernels, 45, 150),
    Stage("0.6B 2048", partial(beside_trl, "0.6B", 2048, 0), 60, 170),
    Stage("sampling", sampling, 45, 120),
    Stage("4B LoRA 64", partial(beside_trl, "4B", 64, 16), 80, 200),
    Stage("4B LoRA 2048", partial(beside_trl, "4B", 2048, 16), 80, 240),
    *(
        Stage(f"{shape} {prompt}, TRL with vLLM", partial(beside_trl, shape.partition(" ")[0], prompt, lora, vllm=True), 120, 300)
        for shape, prompt, lora in (("0.6B", 64, 0), ("4B LoRA", 2048, 16))
        if find_spec("vllm") is not None and find_spec("trl") is not None
    ),
    Stage("shards", partial(tests, "tests/gpu/test_shards.py"), 60, 200),
)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the stages that are not done, while time is left."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(None if arguments is None else [*arguments])
    if unknown := [name for name in asked.stages if name not in names]:
        parser.error(f"there is no stage {unknown[0]!r}; expected {', '.join(names)}")
    options = Options(asked.device, asked.tiny)
    scratch = Path(tempfile.gettempdir())  # figures of a trial are not results
    results = asked.results or (scratch / RESULTS.name if asked.tiny else RESULTS)
    page = asked.page or (scratch / PAGE.name if asked.tiny else PAGE)
    if asked.child:
        name, file = asked.child
        _child(next(stage for stage in STAGES if stage.name == name), options, Path(file))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end the started processes too
    end = time.monotonic() + 60 * asked.minutes - SPARE
    code, rows = _version(), resumable.read(results)
    for stage in STAGES:
        attempts = [row for row in rows if row["stage"] == stage.name and row["code"] == code]
        wanted = not asked.stages or stage.name in asked.stages
        if not wanted or any(row["status"] == "done" for row in attempts) or len(attempts) > 1:
            continue
        left = end - time.monotonic()
        if left < stage.least:
            print(f"{stage.name}: not enough time is left", flush=True)
            continue
        most = left if asked.tiny else stage.most  # the limits do not apply to a trial's machine
        row = {"stage": stage.name, "code": code, **take(stage, options, min(most, left))}
        rows.append(row)
        resumable.append(results, row)
        print(f"{stage.name}: {row['status']} in {row['seconds']:.0f} s {row.get('error', '')[-1500:]}", flush=True)
        if page.exists():
            page.write_text(fill(page.read_text(), measured=table(rows)))
    print(table(rows))
    return 0


def take(stage: Stage, options: Options, seconds: float) -> Figures:
    """Run a stage for at most `seconds`, end its processes, and return its figures."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder, "figures.json"), Path(folder, "errors")
        command = [sys.executable, __file__, "--device", options.device, "--child", stage.name, str(file)]
        with errors.open("w") as stream:
            child = subprocess.Popen(
                command + ["--tiny"] * options.tiny,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env=_environment(options),
            )
            try:
                status = "done" if child.wait(seconds) == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "cut off"
            finally:
                _end(child)
        figures = json.loads(file.read_text()) if file.exists() else {}
        found = {"status": status, "seconds": time.monotonic() - begin, "figures": figures}
        return found if status == "done" else {**found, "error": errors.read_text()[-4000:]}


def _environment(options: Options) -> dict[str, str]:
    """Return the environment variables of a stage. On a GPU the CPU kernels are off, since compiling them takes a minute."""
    path = os.pathsep.join(filter(None, (str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", ""))))
    kernels = {} if options.device == "cpu" else {"PSIGRAD_NATIVE": "0"}
    fixed = {"TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **kernels, **fixed, "PYTHONPATH": path}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a stage with all processes that it started, such as the two sides of a comparison."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _child(stage: Stage, options: Options, file: Path) -> None:
    """Run a stage, and write its figures to a file as they are measured."""
    found: Figures = {}

    def note(figures: Figures) -> None:
        found.update(figures)
        file.with_suffix(".new").write_text(json.dumps(found, default=str))
        file.with_suffix(".new").replace(file)

    stage.run(options, note)


def _version() -> str:
    """Return the version of the measured code: a hash of the packages, since a copy of the repository may have no history."""
    files = sorted(file for folder in ("psigrad", "psigrad_extras") for file in (HERE.parent / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def latest(rows: list[Figures]) -> dict[str, Figures]:
    """Return the last row of each stage. A row that is done takes precedence."""
    found: dict[str, Figures] = {}
    for row in rows:
        if row["status"] == "done" or found.get(row["stage"], {}).get("status") != "done":
            found[row["stage"]] = row
    return found


def table(rows: list[Figures]) -> str:
    """Return a Markdown table of the stages and their figures."""
    lines = ["| stage | status | figures |", "|---|---|---|"]
    known = latest(rows)
    for stage in STAGES:
        row = known.get(stage.name)
        if row is not None:
            status = f"{row['status']}, {row['seconds']:.0f} s ({row['code']})"
            lines.append(f"| {stage.name} | {status} | {'; '.join(summary(row['figures'])) or 'none'} |")
    return "\n".join(lines)


def summary(figures: Figures) -> list[str]:
    """Return the figures of a stage for the table."""
    found = []
    if "gpu" in figures:
        found.append(f"{figures['gpu']}, torch {figures['versions'].get('torch')}, {figures['when'][:10]}")
    for name, value in figures.items():
        if isinstance(value, dict) and "kernels" in value:
            shown = name.replace("lora=False", "without LoRA,").replace("lora=True", "with LoRA,")
            found.append(f"{shown}: {value['kernels']:.0f} kernels, {1e3 * value['seconds']:.2f} ms a layer")
        elif isinstance(value, dict) and "tokens" in value and "why_not" in value:
            found.append(f"{name}: {value['tokens'] / value['seconds']:,.0f} tokens/s")
    both = figures.get("beside") or figures.get("alone")
    if both:
        ours = both["ours"]
        found.append(f"psigrad {ours['seconds']:.2f} s")
        found += [f"TRL {both['trl']['seconds']:.2f} s, ratio {both['ratio']['median']:.2f}"] if "trl" in both else []
        if "gpu_peak_mb" in ours:
            found.append(f"peak {ours['gpu_peak_mb']:,.0f} MB, planned {figures['planned_mb']:,.0f}")
    elif "pairs" in figures:
        last = figures["pairs"][-1]
        found.append(f"psigrad {last['ours_seconds']:.2f} s, TRL {last['trl_seconds']:.2f} s")
    return found + [str(x) for x in (*figures.get("last", ()), *figures.get("failed", ()))]


if __name__ == "__main__":
    sys.exit(main())
