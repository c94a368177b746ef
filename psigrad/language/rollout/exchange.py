"""The exchange of a step's trajectories between the processes that train together.

Every process receives the rewards, lengths, masks and log-probs of all trajectories. Tokens are sent only to the processes that
run a model on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import safetensors.numpy

from psigrad.language.rollout.types import Collected, Trajectory, trajectory_of
from psigrad.processes.parallel.world import World


class RemoteTokens(Sequence[int]):
    """A placeholder for token ids that another process has. It equals any tuple or placeholder with the same length and hash."""

    def __init__(self, length: int, key: int) -> None:
        self.length, self.key = length, key

    def __len__(self) -> int:
        return self.length

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | RemoteTokens) and len(other) == self.length and hash(other) == self.key

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return RemoteTokens(len(range(self.length)[index]), hash((self.key, index.start, index.stop)))
        raise RuntimeError("A token was read on a process that does not have it; please report this.")


def drop_tokens(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without its tokens and texts. Other processes receive it in this form."""

    def remote(ids: Sequence[int]) -> Any:
        return RemoteTokens(len(ids), hash(ids))

    # Metrics count the answers that begin with "error: ".
    answers = [str(message.get("content"))[:7] for message in trajectory.messages if message.get("role") == "tool"]
    return replace(
        trajectory,
        prompt_ids=remote(trajectory.prompt_ids),
        completion=replace(trajectory.completion, ids=remote(trajectory.completion.ids), experts="", prompt_experts=""),
        branches=tuple(branch._replace(prompt_ids=remote(branch.prompt_ids)) for branch in trajectory.branches),
        text="",
        messages=tuple({"role": "tool", "content": content} for content in answers),
        policy_turns=(),
        teacher_prompt_ids=(),
    )


def keep_tokens(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without log-probs, texts, masks and partial rewards: a model reads only prompts and tokens."""
    completion = replace(trajectory.completion, logprobs=(), sampling_logprobs=())
    return replace(trajectory, completion=completion, text="", parts={}, mask=(), messages=(), policy_turns=(), step_rewards=())


_KINDS = {"ids": np.int64, "prompts": np.int64, "numbers": np.float64, "mask": np.bool_}


def pack(rows: Sequence[Trajectory]) -> bytes:
    """Serialise trajectories as arrays. A prompt is stored once, even if several trajectories continue it."""
    arrays: dict[str, list[Any]] = {name: [np.empty(0, kind)] for name, kind in _KINDS.items()}
    prompts: dict[Any, int] = {}

    def put(name: str, values: Any) -> Any:
        if isinstance(values, RemoteTokens):
            return [values.length, values.key]
        arrays[name].append(np.asarray(values))
        return len(values)

    def prompt(ids: Any) -> int:
        return prompts.setdefault(ids, len(prompts))

    packed = []
    for t in rows:
        completion, row = _changed_fields(t.completion), _changed_fields(t)
        own, drawn = t.completion.logprobs, t.completion.sampling_logprobs
        completion |= {"ids": put("ids", t.completion.ids), "logprobs": put("numbers", own)}
        completion["sampling_logprobs"] = None if own == drawn else put("numbers", drawn)
        row |= {"completion": completion, "prompt_ids": prompt(t.prompt_ids), "mask": put("mask", t.mask)}
        row["teacher_prompt_ids"] = prompt(t.teacher_prompt_ids)
        row["branches"] = [(branch.start, prompt(branch.prompt_ids)) for branch in t.branches]
        packed.append(row)
    text = json.dumps({"rows": packed, "prompts": [put("prompts", ids) for ids in prompts]}, ensure_ascii=False)
    flat: dict[str, Any] = {name: np.concatenate(parts, dtype=_KINDS[name], casting="unsafe") for name, parts in arrays.items()}
    for name in ("ids", "prompts"):
        if flat[name].max(initial=0) < 2**31:  # true unless there is an image, whose token ids are larger
            flat[name] = flat[name].astype(np.int32)
    if np.array_equal(small := flat["numbers"].astype(np.float32), flat["numbers"], equal_nan=True):
        flat["numbers"] = small
    return safetensors.numpy.save({**flat, "rest": np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)})


def unpack(data: bytes) -> list[Trajectory]:
    """Return the trajectories that `pack` serialised."""
    arrays = safetensors.numpy.load(data)
    held, at = json.loads(arrays["rest"].tobytes().decode("utf-8", "surrogatepass")), dict.fromkeys(arrays, 0)

    def take(name: str, count: Any, as_tuple: bool = True) -> Any:
        if isinstance(count, list):
            return RemoteTokens(*count)
        at[name] += count
        found: Any = arrays[name][at[name] - count : at[name]]
        return tuple(found.tolist()) if as_tuple else memoryview(found)  # a memoryview avoids a copy

    prompts, rows = [take("prompts", count) for count in held["prompts"]], []
    for row in held["rows"]:
        completion, with_tokens = row["completion"], not isinstance(row["completion"]["ids"], list)
        own = take("numbers", completion["logprobs"], with_tokens)
        drawn = own if completion["sampling_logprobs"] is None else take("numbers", completion["sampling_logprobs"], with_tokens)
        completion |= {"ids": take("ids", completion["ids"]), "logprobs": own, "sampling_logprobs": drawn}
        row |= {"mask": take("mask", row["mask"], with_tokens), "branches": [(start, prompts[n]) for start, n in row["branches"]]}
        row |= {name: prompts[row[name]] for name in ("prompt_ids", "teacher_prompt_ids")}
        rows.append(trajectory_of(row))
    return rows


def _changed_fields(made: Any) -> dict[str, Any]:
    """Return {name: value} of the fields of a dataclass instance that differ from their defaults."""
    return {f.name: x for f in fields(made) if (x := getattr(made, f.name)) != f.default}


def gather_trajectories(world: World, own: Sequence[Trajectory], *, with_tokens: bool = False) -> list[list[Trajectory]]:
    """Return one list of trajectories per rank. `own` are the trajectories of this process.

    Trajectories from other processes have neither tokens nor texts (`drop_tokens`), unless `with_tokens` is True.
    """
    made = list(own) if with_tokens else [replace(t, holders=(world.rank,)) for t in own]
    data = pack(made if with_tokens else [drop_tokens(t) for t in made])
    each = world.exchange([b"" if rank == world.rank else data for rank in range(world.size)])
    return [made if rank == world.rank else unpack(part) for rank, part in enumerate(each)]


def broadcast_collected(world: World, collected: Collected) -> Collected:
    """Send rank 0's `collected` to all ranks, and return it. On other ranks, its completions have no tokens."""
    place = {id(t): n for n, t in enumerate(collected.trajectories)}
    groups = [[place[id(t)] for t in group] for group in collected.groups]
    groups, cursor, entries = world.broadcast((groups, collected.cursor, collected.entries))
    rows = gather_trajectories(world, collected.trajectories if world.rank == 0 else [])[0]
    return Collected(rows, [[rows[n] for n in group] for group in groups], cursor, entries)


def fetch_tokens(world: World, rows: list[Trajectory], rows_by_rank: Sequence[Sequence[int]]) -> None:
    """Fetch missing tokens from other ranks, and set them in `rows`. Rank r needs the rows with the indices `rows_by_rank[r]`.

    All ranks must call this function with the same `rows_by_rank`.
    """
    lacks = [[i for i in places if rows[i].holders and rank not in rows[i].holders] for rank, places in enumerate(rows_by_rank)]
    if not any(lacks):
        return
    parts = [pack([keep_tokens(rows[i]) for i in places if rows[i].source_rank == world.rank]) for places in lacks]
    for home, part in enumerate(world.exchange(parts)):
        for i, own in zip([i for i in lacks[world.rank] if rows[i].source_rank == home], unpack(part), strict=True):
            brought = {name: getattr(own.completion, name) for name in ("ids", "experts", "prompt_experts")}
            brought = {"completion": replace(rows[i].completion, **brought)}
            brought |= {name: getattr(own, name) for name in ("prompt_ids", "branches", "teacher_prompt_ids")}
            rows[i] = replace(rows[i], **brought)
    for rank, places in enumerate(lacks):
        for i in places:
            rows[i] = replace(rows[i], holders=(*rows[i].holders, rank))


def gather_rows(world: World, rows_by_key: Mapping[int, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Send the rows of all ranks to rank 0. Rank 0 returns all rows, sorted by key. Every other rank returns its own rows."""
    data = json.dumps(list(rows_by_key.items())).encode() if world.rank else b""
    each = world.exchange([b"" if rank else data for rank in range(world.size)])
    rows = [*rows_by_key.items(), *(pair for part in each if part for pair in json.loads(part))]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]
