"""A server of the Tinker API on this machine: Tinker's client trains adapters of a model here, and samples from them.

A request for work returns the name of a future, which the client polls until the result is ready. The name consists of the
model's name and the client's number of the request, so that a repeated request runs once. Messages have the client's format
(`tinker.proto`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response

from psigrad import extras
from psigrad.config import Model, Run
from psigrad.config.load import from_dict
from psigrad.errors import UserError
from psigrad.language.loading.model_source import locate
from psigrad.language.models import language_model
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.types import Completion, SamplingParams
from psigrad.paths import absolute, claim
from psigrad.records.checkpoint import restore_folder
from psigrad.runs import machine
from psigrad_serve.api_errors import ApiError, as_json
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.engine.streams import TokenStream
from psigrad_serve.forms import read_json
from psigrad_serve.served import seed_of
from psigrad_serve.tinker_models import ALPHA, TinkerDatum, TinkerModel
from psigrad_serve.writer import Writer

PATIENCE = 20.0
"""The seconds that a poll waits for its future before it answers that the client should try again."""
KEPT = 4
"""The maximum number of sampling engines that are open; the least recently used are closed."""
ANSWERS = 1000
"""The number of finished answers that are kept, for clients that repeat a request."""
_PROTO = "application/x-protobuf"


def _messages() -> Any:
    with extras.needing("The Tinker API", "tinker"):
        from tinker.proto import tinker_public_pb2
    return tinker_public_pb2


@dataclass
class TinkerServer:
    """The server: it trains adapters of the model `base`, which clients call `name`, and stores their states in `folder`."""

    base: str
    name: str
    folder: Path
    how: Mapping[str, Any] = field(default_factory=dict)
    """The settings for loading models: device, dtype and trust_remote_code of `language_model.load`."""
    max_batch: int = 64
    messages: Any = field(default_factory=_messages)
    models: dict[str, TinkerModel] = field(default_factory=dict)
    samplers: dict[str, str] = field(default_factory=dict)
    """The path of each sampling session's weights; "" is the base model."""
    futures: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    engines: dict[str, SamplingEngine] = field(default_factory=dict)
    saves: Counter[str] = field(default_factory=Counter)
    """The number of saves to each path, so that an engine with an earlier state is not used for a later one."""

    def __post_init__(self) -> None:
        self._trainer, self._opening = ThreadPoolExecutor(1, "trainer"), asyncio.Lock()

    @classmethod
    def of(cls, path: str, name: str, folder: str, given: Mapping[str, Any]) -> TinkerServer:
        """Create the server from the options of `psigrad serve`. Raises `UserError` for options that are unsupported here."""
        if given["vision"]:
            raise UserError("--tinker does not take --vision, since this server trains on text only; remove --vision.")
        for flag, usual in (("sampler", "embedded"), ("chat_template_path", "")):
            if given[flag] != usual:
                raise UserError(
                    f"--tinker does not take --{flag.replace('_', '-')} {given[flag]}: the client writes the prompts, and only "
                    "the embedded sampler samples; remove the flag."
                )
        run = from_dict(Run, {"device": given["device"], "threads": given["threads"]}, "")
        machine.prepare_torch(run)
        how = {"dtype": given["dtype"], "trust_remote_code": given["trust_remote_code"]}
        base = locate(from_dict(Model, {"path": path, "adapter": "merge", **how}, ""))
        return cls(
            base,
            name,
            claim(absolute(folder), "serve --tinker", "--state"),
            {"device": machine.device(run), **how},
            given["max_batch"],
        )

    def close(self) -> None:
        """Cancel queued work, wait for running work, and close the engines."""
        self._trainer.shutdown(cancel_futures=True)
        for engine in self.engines.values():
            engine.close()

    def routes(self) -> APIRouter:
        """Return the routes, under /api/v1."""
        routes = APIRouter(prefix="/api/v1")
        calls: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            name.removeprefix("_do_"): getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

        @routes.get("/healthz")
        async def healthy() -> dict[str, Any]:
            return {"status": "ok"}

        @routes.get("/get_server_capabilities")
        async def capabilities() -> dict[str, Any]:
            return {"supported_models": [{"model_name": self.name, "trainable": True, "sampleable": True}]}

        @routes.get("/samplers/{sampler}")
        async def sampler(sampler: str) -> dict[str, Any]:
            return {"sampler_id": sampler, "base_model": self.name, "model_path": self.samplers.get(sampler) or None}

        @routes.post("/sessions/{session}/finish")
        async def finish(session: str) -> dict[str, Any]:
            return {}

        @routes.post("/forward_backward")
        async def forward_backward(request: Request) -> dict[str, Any]:
            return self._forward_backward(await request.body())

        @routes.post("/retrieve_future")
        async def retrieve(request: Request) -> Response:
            return await self._retrieve(str(read_json(await request.body()).get("request_id")))

        @routes.post("/{path:path}")
        async def called(path: str, request: Request) -> Any:
            if (call := calls.get(path.replace("/", "_"))) is None:
                raise ApiError(f"This server does not support the call {path}.", status=404)
            return await call(read_json(await request.body()))

        return routes

    async def _do_client_config(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": False}

    async def _do_client_dynamic_config(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    async def _do_telemetry(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"status": "accepted"}

    async def _do_session_heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "session_heartbeat"}

    async def _do_create_session(self, body: Mapping[str, Any]) -> dict[str, Any]:
        told = "psigrad adapts every linear layer except the head, so train_unembed has no effect."
        return {"type": "create_session", "session_id": secrets.token_hex(8), "info_message": told}

    async def _do_create_model(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model_id, lora = f"{body['session_id']}:train:{body['model_seq_id']}", body.get("lora_config") or {}
        self._check_base(body["base_model"])
        if not (lora.get("train_mlp", True) and lora.get("train_attn", True)):
            raise ApiError("This server adapts every linear layer; do not set train_mlp or train_attn to false.")
        rank, seed = int(lora.get("rank") or 32), lora.get("seed")

        def make() -> dict[str, Any]:
            self.models[model_id] = TinkerModel.fresh(self.base, rank, seed or 0, **self.how)
            return {"type": "create_model", "model_id": model_id}

        return self._later(f"{model_id}:create", make)

    async def _do_get_info(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model = self._model(body["model_id"])
        told = {"model_name": self.name, "tokenizer_id": self.base, "arch": type(model.model.network).__name__}
        more = {"model_id": body["model_id"], "is_lora": True, "lora_rank": model.rank, "model_name": self.name}
        return {"type": "get_info", "model_data": told, **more}

    async def _do_weights_info(self, body: Mapping[str, Any]) -> dict[str, Any]:
        rank = Lora.of(_config(self._place(body["tinker_path"]))).rank
        return {"base_model": self.name, "is_lora": True, "lora_rank": rank}

    async def _do_optim_step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if "adam_params" not in body:
            raise ApiError("This server has only the optimiser AdamW; send adam_params.")
        model, adam = self._model(body["model_id"]), body["adam_params"]
        how = (adam["learning_rate"], (adam["beta1"], adam["beta2"]), adam["eps"], adam["weight_decay"], adam["grad_clip_norm"])
        return self._later(_name(body), lambda: {"metrics": {"grad_norm:mean": model.step(*how)}})

    async def _do_save_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._save(body, "weights", optimizer=True)

    async def _do_save_weights_for_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._save(body, "sampler_weights", optimizer=False)

    async def _do_load_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        place = self._place(body["path"])
        model_id = body.get("model_id") or f"{body['session_id']}:train:{body['model_seq_id']}"

        def load() -> dict[str, Any]:
            if model_id not in self.models:
                self.models[model_id] = TinkerModel.fresh(self.base, Lora.of(_config(place)).rank, 0, **self.how)
            self.models[model_id].load(place, bool(body.get("optimizer")))
            return {"type": "load_weights", "path": body["path"], "model_id": model_id}

        return self._later(_name({**body, "model_id": model_id}), load)

    async def _do_create_sampling_session(self, body: Mapping[str, Any]) -> dict[str, Any]:
        path = body.get("model_path") or ""
        if path:
            self._place(path)
        else:
            self._check_base(body.get("base_model"))
        name = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        self.samplers[name] = path
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def _do_asample(self, body: Mapping[str, Any]) -> dict[str, Any]:
        session = body.get("sampling_session_id")
        if session and session not in self.samplers:
            raise ApiError(f"There is no sampling session {session!r}; create one.", status=404)
        for wanted in ("topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "topk_sample_logprobs"):
            if body.get(wanted):
                raise ApiError(f"This server does not support {wanted}; remove it.")
        path = self.samplers[session] if session else body.get("model_path") or ""
        name = f"{session}:{body['seq_id']}" if session and body.get("seq_id") is not None else secrets.token_hex(8)
        if name not in self.futures:
            self._keep(name, self._sampled(path, body))
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{k}" for k in range(body.get("num_samples", 1))]}

    async def _sampled(self, path: str, body: Mapping[str, Any]) -> Any:
        """Sample completions of a prompt, and return them as a message in the client's format."""
        engine, asked = await self._engine(path), body["sampling_params"]
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk.get("tokens", ())]
        if any(chunk.get("type") != "encoded_text" for chunk in body["prompt"]["chunks"]):
            raise ApiError("A prompt contains something other than text, but this server reads only text.")
        stop = asked.get("stop")
        if stop == []:
            raise ApiError("stop is [], but this sampler always stops at EOS; remove stop.")
        words = [stop] if isinstance(stop, str) else [each for each in stop or () if isinstance(each, str)]
        ids = tuple(each for each in stop or () if isinstance(each, int))
        room = engine.model.max_length - len(prompt)
        if room < 1:
            raise ApiError(
                f"The prompt has {len(prompt)} tokens but the model has {engine.model.max_length} positions; shorten the prompt."
            )
        params = SamplingParams(
            max_tokens=min(asked.get("max_tokens") or room, room),
            temperature=asked.get("temperature", 1.0),
            top_p=asked.get("top_p", 1.0),
            top_k=max(0, asked.get("top_k", 0)),
            stop_token_ids=ids,
        )
        seed = asked.get("seed")
        seed = secrets.randbits(63) if seed is None else seed % 2**64
        streams = [engine.submit(prompt, params, seed_of(seed, k)) for k in range(body.get("num_samples", 1))]
        made = self.messages.SampleResponse()
        for written, reason in await asyncio.gather(*(_written(each, Writer(engine.model.tokenizer, words)) for each in streams)):
            own = made.sequences.add()
            own.stop_reason = getattr(self.messages, f"STOP_REASON_{reason}")
            own.tokens = np.asarray(written.ids, dtype=np.int32).tobytes()
            own.logprobs = np.asarray(written.logprobs, dtype=np.float32).tobytes()
        if body.get("prompt_logprobs"):
            made.prompt_logprobs = await asyncio.to_thread(_prompt_logprobs, engine, prompt)
        return made

    def _forward_backward(self, body: bytes) -> dict[str, Any]:
        asked = self.messages.ForwardBackwardRequest()
        asked.ParseFromString(body)
        model, data = self._model(asked.model_id), [_datum(datum) for datum in asked.data]
        how = {name: value.number for name, value in asked.loss_fn_config_v2.items()} or dict(asked.loss_fn_config)

        def work() -> Any:
            logprobs, loss = model.forward_backward(data, asked.loss_fn, how, backward=not asked.forward_only)
            made = self.messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
            made.metrics["loss:sum"] = loss
            record = made.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
            rows = [row.numpy().astype(np.float32) for row in logprobs]
            ends = np.cumsum([0, *(row.nbytes for row in rows)]).astype(np.int64)
            tensor = record.fields["logprobs"]
            tensor.data, tensor.offsets = b"".join(row.tobytes() for row in rows), ends.tobytes()
            tensor.dtype = self.messages.DTYPE_FLOAT32
            return made

        return self._later(f"{asked.model_id}:{asked.seq_id}", work)

    def _save(self, body: Mapping[str, Any], kind: str, *, optimizer: bool) -> dict[str, Any]:
        model = self._model(body["model_id"])
        name = body.get("path") or f"step-{body['seq_id']}"
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith("."):
            raise ApiError(f"A state cannot have the name {name!r}; use letters, digits, -, _ and ., with no . at the start.")
        path = f"tinker://{body['model_id']}/{kind}/{name}"
        place = self.folder / body["model_id"] / kind / name

        def save() -> dict[str, Any]:
            place.parent.mkdir(parents=True, exist_ok=True)
            model.save(place, optimizer)
            self.saves[path] += 1
            made: dict[str, Any] = {"type": f"save_{kind}" if kind == "weights" else "save_weights_for_sampler", "path": path}
            if kind == "sampler_weights" and body.get("sampling_session_seq_id") is not None:
                session = f"{body['model_id']}:sample:{body['sampling_session_seq_id']}"
                self.samplers[session] = path
                made["sampling_session_id"] = session
            return made

        return self._later(_name(body), save)

    def _later(self, name: str, work: Callable[[], Any]) -> dict[str, Any]:
        """Queue work for the training thread, unless a request of this name is queued or done. Return the future's name."""
        if name not in self.futures:
            self._keep(name, asyncio.get_running_loop().run_in_executor(self._trainer, work))
        return {"request_id": name, "model_id": name.rpartition(":")[0]}

    def _keep(self, name: str, work: Awaitable[Any]) -> None:
        self.futures[name] = asyncio.ensure_future(_told(work))
        done = [old for old, future in self.futures.items() if future.done()] if len(self.futures) > 2 * ANSWERS else []
        for old in done[:ANSWERS]:
            del self.futures[old]

    async def _retrieve(self, name: str) -> Response:
        if name not in self.futures:
            raise ApiError(f"The request {name!r} is unknown, or its answer was dropped; send it again.", status=410)
        done, _ = await asyncio.wait({self.futures[name]}, timeout=PATIENCE)
        if not done:
            return as_json({"type": "try_again", "request_id": name, "queue_state": "active"})
        found = self.futures[name].result()
        return as_json(found) if isinstance(found, dict) else Response(found.SerializeToString(), media_type=_PROTO)

    async def _engine(self, path: str) -> SamplingEngine:
        """Return the sampling engine of the weights at `path` ("": the base model), and open it if needed."""
        if path:
            self._place(path)
        stamp = f"{path}@{self.saves[path]}"
        async with self._opening:
            if stamp not in self.engines:
                self.engines[stamp] = await asyncio.to_thread(self._open, path)
                idle = [name for name, engine in self.engines.items() if not engine.active and not engine.waiting]
                for old in [name for name in idle if name != stamp][: max(0, len(self.engines) - KEPT)]:
                    self.engines.pop(old).close()
            self.engines[stamp] = self.engines.pop(stamp)
            return self.engines[stamp]

    def _open(self, path: str) -> SamplingEngine:
        place = self._place(path) if path else None
        adapted: dict[str, Any] = {"lora": Lora(Lora.of(_config(place)).rank, ALPHA), "adapter": place} if place else {}
        return SamplingEngine(language_model.load(self.base, **self.how, **adapted), self.max_batch)

    def _model(self, name: str) -> TinkerModel:
        if name not in self.models:
            raise ApiError(f"This server trains no model {name!r}; create one, or load one from a state.", status=404)
        return self.models[name]

    def _check_base(self, name: str | None) -> None:
        if name not in (self.name, self.base):
            raise ApiError(f"There is no base model {name!r}; this server has {self.name!r}.", status=404)

    def _place(self, path: str) -> Path:
        parts = path.removeprefix("tinker://").split("/")
        place = self.folder.joinpath(*parts)
        if not path.startswith("tinker://") or len(parts) != 3 or ".." in parts or not restore_folder(place):
            raise ApiError(f"This server has no state {path!r}.", status=404)
        return place


async def _written(stream: TokenStream, writer: Writer) -> tuple[Completion, str]:
    """Return (completion, finish reason). Stop sampling when the completion has a stop string, and end it there."""
    count = await stream.write(writer)
    return stream.completion(count), "STOP" if writer.stopped or stream.finish_reason == "stop" else "LENGTH"


async def _told(work: Awaitable[Any]) -> Any:
    """Await `work` and return its result, or its error in the client's format."""
    try:
        return await work
    except (ApiError, UserError, ValueError) as error:
        return {"error": str(getattr(error, "message", error)), "category": "user"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "category": "server"}


def _name(body: Mapping[str, Any]) -> str:
    return f"{body['model_id']}:{body.get('seq_id') or secrets.token_hex(8)}"


def _config(place: Path) -> dict[str, Any]:
    return read_json((place / "adapter_config.json").read_bytes())


def _datum(datum: Any) -> TinkerDatum:
    """Return the `TinkerDatum` for a datum of the client's message."""
    tokens: list[int] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise ApiError("A datum contains something other than text, but this server reads only text.")
        tokens += np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
    return TinkerDatum.of(tokens, {name: _tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()})


def _tensor(tensor: Any) -> torch.Tensor:
    if tensor.HasField("sparse_csr"):
        raise ApiError("A datum has a sparse tensor, but this server takes one target per position; send a dense tensor.")
    kinds = type(tensor).DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number
    kind = np.float32 if kinds[tensor.dtype].name == "DTYPE_FLOAT32" else np.int64
    flat = torch.from_numpy(np.frombuffer(tensor.dense, dtype=kind).copy())
    return flat.reshape(tuple(tensor.shape)) if tensor.shape else flat


def _prompt_logprobs(engine: SamplingEngine, prompt: list[int]) -> bytes:
    """Return the log-probs of a prompt's tokens, without the first one, as float32 bytes."""
    with engine.held(), torch.no_grad():
        logp = engine.model.evaluate(Groups([tuple(prompt[:1])], [[tuple(prompt[1:])]])).logp[0, : len(prompt) - 1]
    return np.concatenate([[np.nan], logp.float().cpu().numpy()]).astype(np.float32).tobytes()
