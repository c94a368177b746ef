"""Responses with completions: a list, a group side by side, and a pair for the labelling page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.records.read import messages
from psigrad.records.rows import number
from psigrad.redaction import escape
from psigrad_studio.labels.completion_groups import ROLLOUT
from psigrad_studio.runs.advantage_notes import explained, group_said
from psigrad_studio.runs.rollout_index import RolloutIndex, RolloutQuery
from psigrad_studio.runs.tokens import MOST_TOKENS, config_of, finite, texts_of, token_table, tokenizer_of
from psigrad_studio.security import Refused

BEGINNING, LONGEST, MOST_MEMBERS = 160, 20_000, 64


def listed(index: RolloutIndex, wanted: RolloutQuery, first: int, count: int, seconds: float) -> dict[str, Any]:
    """Return a page of the matching rollouts, their number, and the available filters."""
    whole = index.read(seconds)
    numbers, searched = index.find(wanted, seconds)
    return {
        **index.overview(),
        "generation": index.generation,
        "found": len(numbers),
        "whole": whole and searched,
        "rows": briefs(index, numbers[first : first + count]),
    }


def briefs(index: RolloutIndex, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return the list entries of the rollouts with these numbers."""
    return [
        {
            "n": n,
            "group": index.group(n),
            "step": row["step"],
            "kind": str(row.get("kind", "")),
            "k": row.get("k", row.get("episode")),
            "reward": number(row.get("reward")),
            "advantage": number(row.get("advantage")),
            "status": str(row.get("status", "")),
            "cut": row.get("finish_reason") == "length",
            "tokens": _length(row),
            "prompt": _beginning(_last_said(row.get("prompt"))),
            "completion": _beginning(str(row.get("completion") or "")),
        }
        for n, row in index.rows(numbers)
    ]


def dead_said(index: RolloutIndex, step: float) -> str:
    """Return a sentence with the number of dead groups (equal rewards) of a step, all right or all wrong; "" without any."""
    total, dead, good, bad = index.dead(step)
    if not dead:
        return ""
    return f"Of {total} groups at step {step:.0f}, {dead} have equal rewards: {good} the run's highest, {bad} its lowest."


def _beginning(text: str) -> str:
    return escape(" ".join(text[: 4 * BEGINNING].split()))[:BEGINNING]


def _length(row: Mapping[str, Any]) -> float | None:
    """Return the tokens of a completion, or the steps of an episode."""
    ids = row.get("completion_ids")
    return len(ids) if isinstance(ids, list) else finite(number(row.get("length")))


def _last_said(prompt: Any) -> str:
    said = messages(prompt)
    return said[-1][1] if said else "" if isinstance(prompt, list) else str(prompt or "")


def group(index: RolloutIndex, n: int, generation: int, run: Path, root: Path, seconds: float) -> dict[str, Any]:
    """Return the group of a rollout, with its prompt once. Raises `Refused` if the run's file was truncated since."""
    index.read(seconds)
    rows = _rows(index, index.group_of(n)[:MOST_MEMBERS], generation, seconds)
    if not rows:
        raise UserError("This completion is no longer in the run's files; search again.")
    config = config_of(run)
    tokenizer = tokenizer_of(run, config, root)
    members, story = [], [row for _, row in rows]
    for number_, row in rows:
        members.append({**_member(row, story), "n": number_, **_tokens(row, tokenizer)})
    return {
        "generation": index.generation,
        "step": story[0]["step"],
        "kind": str(story[0].get("kind", "")),
        "row": story[0].get("row"),
        "prompt": _messages(story[0].get("prompt")),
        "said": group_said(story),
        "names": tokenizer is not None,
        "members": members,
    }


def _cuts(cuts: Any) -> list[str]:
    """Return sentences on the environment's observations that were cut or dropped before the policy read them."""
    found = [cut for cut in cuts if isinstance(cut, Mapping)] if isinstance(cuts, list) else []
    whose = [f"answer to turn {cut.get('turn')}" if cut.get("turn") else "opening" for cut in found]
    ways = ["was dropped" if cut.get("kind") == "dropped" else "was cut" for cut in found]
    why = [str(cut.get("reason") or "") for cut in found]
    return [escape(f"The {a} {b} ({c}).")[:300] for a, b, c in zip(whose, ways, why, strict=True)]


def _member(row: Mapping[str, Any], story: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts = row.get("parts")
    completion = str(row.get("completion") or "")
    return {
        "k": row.get("k", row.get("episode")),
        "reward": finite(number(row.get("reward"))),
        "advantage": finite(number(row.get("advantage"))),
        "parts": {escape(str(k))[:80]: finite(number(v)) for k, v in parts.items()} if isinstance(parts, Mapping) else {},
        "status": str(row.get("status", "")),
        "reason": escape(str(row.get("reason") or ""))[:600],
        "finish": str(row.get("finish_reason", "")),
        "turns": row.get("turns"),
        "cuts": _cuts(row.get("cuts")),
        "length": _length(row),
        "why": explained(row, story),
        "completion": escape(completion[:LONGEST]),
        "left_out": max(0, len(completion) - LONGEST),
    }


def _tokens(row: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    if not isinstance(row.get("completion_ids"), list):
        return {"tokens": None}
    return {"tokens": token_table(row, texts_of(row, tokenizer)), "tokens_cut": len(row["completion_ids"]) > MOST_TOKENS}


def _messages(prompt: Any) -> list[dict[str, str]]:
    """Return a prompt as messages. A plain text has no role."""
    if not isinstance(prompt, list):
        return [{"role": "", "content": escape(str(prompt or ""))[:LONGEST]}]
    return [{"role": escape(role)[:40], "content": escape(text)[:LONGEST]} for role, text in messages(prompt)]


def _rows(index: RolloutIndex, numbers: Sequence[int], generation: int, seconds: float) -> list[tuple[int, dict[str, Any]]]:
    index.read(seconds)
    if index.generation != generation:
        raise Refused(409, "moved", "The run has resumed from an earlier checkpoint; search again.")
    return index.rows(numbers)


def pair(index: RolloutIndex, n: int, other: int, generation: int, run: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the prompt and two completions of one group, each with its origin. Raises `UserError` if they are not a pair."""
    rows = dict(_rows(index, [n, other], generation, 2.0))
    if n == other or len(rows) < 2 or index.group(n) != index.group(other):
        raise UserError("A pair needs two different completions of one prompt; choose two of a group.")
    first, second = (
        {**{name: rows[i][name] for name in ROLLOUT if rows[i].get(name) is not None}, "completion": rows[i].get("completion")}
        | {"run": run, "sampler": f"step {rows[i]['step']}", "source": f"{run}/rollouts.jsonl:{i + 1}"}
        for i in (n, other)
    )
    return rows[n].get("prompt"), first, second
