"""Agents that ask the policy over HTTP: their sessions have the tokens that this process would sample, and its gradient."""

from __future__ import annotations

import itertools
import re
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import sample_agents
import torch
from in_memory import advance, make, rollout_of, with_player

from psigrad.errors import UserError
from psigrad.importing import imported_callable
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import CHATML, prompt_ids
from psigrad.language.models import tiny
from psigrad.language.rollout.types import Prompt, State
from psigrad.language.training.online.collect import completion_seed
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.processes.sandbox import enclosure_of_workers
from psigrad_serve.agents.agent_gateway import AgentGateway
from psigrad_serve.agents.agent_rollouts import AgentPool, Agents
from psigrad_serve.agents.agent_worker import AgentCommand, check_agent

pytest.importorskip("openai")
pytest.importorskip("fastapi")


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny.tokenizer(["say a: b again"], 270)
    made.chat_template = CHATML
    return made


def letters(completions, **columns):
    """The share of early letters in all that the policy said."""
    said = ["".join(m["content"] for m in messages if m["role"] == "assistant") for messages in completions]
    return [sum(c in "abcdefgh \n" for c in text) / (1 + len(text)) for text in said]


def talking(tokenizer, agent="once", what=("",) * 8, algorithm="grpo") -> OnlineRun:
    """The run of `in_memory.make` on conversations, whose rows name the agent that asks."""
    run = make(tokenizer, algorithm, function=letters, max_length=256)
    asked = [[{"role": "user", "content": f"say {c}:"}] for c in "abcdefgh"]
    rows = [Row("x", prompt=messages, columns={"agent": agent, "what": w}) for messages, w in zip(asked, what, strict=True)]
    prompts = [Prompt(i, tuple(prompt_ids(tokenizer, row)), row) for i, row in enumerate(rows)]
    return replace(run, prompts=prompts, params=replace(run.params, stop_token_ids=(tokenizer.eos_token_id,)))


@pytest.fixture(scope="module")
def agents():
    """Those of `sample_agents`: the row says which."""
    with closing(Agents(AgentPool(sample_agents.of_row, workers=2), AgentGateway(), 6)) as made:
        yield made


def sessions(run: OnlineRun, agents: Agents | None, count: int = 2, prompts: int = 2):
    """Completions of the first prompts, by the agents or here."""
    seed_of = partial(completion_seed, run.config.run.seed, 0)
    rollout = rollout_of(run.sampler, run.model, run.rollout.scorer, agents)
    return rollout(run.prompts[:prompts], run.params, count, seed_of, version=0)


def grad(run: OnlineRun, agents: Agents | None) -> torch.Tensor:
    """The gradient of one step, before the optimiser sees it."""
    seen: list[torch.Tensor] = []
    run = with_player(run, agents)
    norm = run.optimizer.norm

    def look(*read: Callable[[torch.Tensor], object]) -> float:
        seen.append(torch.cat([p.grad.flatten() for p in run.model.trainable().values()]).clone())
        return norm(*read)

    run.optimizer.norm = look
    advance(run, State(algorithm=run.algorithm.initial_state()))
    return seen[0]


def test_one_question_has_the_tokens_of_this_process_and_its_gradient(tokenizer, agents):
    alone, served = talking(tokenizer), talking(tokenizer)
    here, there = sessions(alone, None), sessions(served, agents)
    assert [t.completion.ids for t in here] == [t.completion.ids for t in there]
    assert [t.reward for t in here] == [t.reward for t in there] and len({t.reward for t in here}) > 1
    assert [t.prompt_ids for t in here] == [t.prompt_ids for t in there]
    gaps = [torch.tensor(x.completion.logprobs) - torch.tensor(y.completion.logprobs) for x, y in zip(here, there, strict=True)]
    assert max(float(gap.abs().max()) for gap in gaps) < 1e-5
    gradients = [grad(alone, None), grad(served, agents)]
    assert gradients[0].abs().max() > 1e-3
    assert (gradients[0] - gradients[1]).abs().max() < 1e-6


def without_logprobs(trajectory):
    """All of a trajectory that must not vary by a bit."""
    return replace(trajectory, completion=replace(trajectory.completion, logprobs=()))


def test_a_conversation_in_branches_is_one_trajectory_and_trains(tokenizer, agents):
    run = talking(tokenizer, "sub_agents")
    first, again = sessions(run, agents), sessions(run, agents)
    # sub-agents ask at once, and no token depends on who came first; log-probs vary by rounding with who decodes beside them
    gaps = [torch.tensor(a.completion.logprobs) - torch.tensor(b.completion.logprobs) for a, b in zip(first, again, strict=True)]
    assert max(float(gap.abs().max()) for gap in gaps) < 1e-5
    assert [without_logprobs(t) for t in first] == [without_logprobs(t) for t in again]
    for t in first:
        assert len(t.branches) == 3 and t.turns == 5 and t.status == "scored", t.reason
        assert t.reward == t.parts["agent"] + t.parts["letters"]
        assert t.contexts[0].prompt_ids == run.prompts[t.row].ids
        assert t.num_chosen == sum(t.mask) and all(t.mask[branch.start] for branch in t.branches)
        logps = [run.sampler.log_probs(c.prompt_ids, [c.ids], run.params)[0] for c in t.contexts]
        gaps = [abs(a - b) for a, b, own in zip(itertools.chain(*logps), t.completion.logprobs, t.mask, strict=True) if own]
        assert max(gaps) < 1e-5, "each token's log-prob is that behind what its own branch had read"
    assert grad(run, agents).abs().max() > 1e-4


def test_a_conversation_that_goes_on_keeps_its_tokens(tokenizer, agents):
    for t in sessions(talking(tokenizer, "three_turns"), agents):
        assert not t.branches and t.turns == 3 and len(t.policy_turns) == 3
        assert t.parts["agent"] == float(sum(map(len, t.policy_turns)) % 7)
        assert [m["role"] for m in t.messages] == ["assistant", "user"] * 2 + ["assistant"]


def test_an_answer_as_short_as_its_agent_wants_it_is_not_cut(tokenizer, agents):
    short, cut = (sessions(talking(tokenizer, agent), agents) for agent in ("one_letter", "once"))
    assert [(len(t.completion.ids), t.completion.finish_reason) for t in short] == [(1, "stop")] * 4
    assert "length" in {t.completion.finish_reason for t in cut}, "negative control: the run's own limit"


def test_an_agent_needs_no_client_of_anybody_s(tokenizer, agents):
    assert [(t.turns, t.status) for t in sessions(talking(tokenizer, "by_hand"), agents)] == [(1, "scored")] * 4


def test_trouble_is_the_session_s_own_record(tokenizer, agents):
    """The rest of this is in `test_a_session_that_hangs_or_exits_takes_no_other_along`."""
    what = ("", "mute", "crash", "flood", "words", "", "", "")
    made = sessions(talking(tokenizer, "troubled", what), agents, count=1, prompts=6)
    check_trouble(what[:6], made)


WHY = {
    "mute": "sent the policy no request",
    "crash": "ValueError: no idea (sample_agents.py, line",
    "exit": "its process died (",
    "hang": "did not end within 4 s (agent_timeout)",
    "flood": "more than 6 requests (agent_calls)",
    "words": "returned 'good' as its reward; expected a number or None",
}
TURNS = {"mute": 0, "flood": 6}


def check_trouble(what, made) -> None:
    for w, t in zip(what, made, strict=True):
        assert (t.status, t.turns) == ("unscored" if w else "scored", TURNS.get(w, 1)), t.reason
        assert WHY.get(w, "") in t.reason
        assert (t.reward is None) == bool(w)


@pytest.mark.slow
def test_a_session_that_hangs_or_exits_takes_no_other_along(tokenizer):
    what = ("", "exit", "hang", "crash", "exit", "", "hang", "")
    with closing(Agents(AgentPool(sample_agents.of_row, timeout=4.0, workers=2), AgentGateway(), 6)) as agents:
        check_trouble(what, sessions(talking(tokenizer, "troubled", what), agents, count=1, prompts=8))


@pytest.mark.slow
def test_a_program_is_asked_as_a_function_is(tokenizer, agents):
    program = AgentCommand(f"{sys.executable} {Path(sample_agents.__file__)}")
    with closing(Agents(AgentPool(program, workers=2), AgentGateway())) as asked:
        assert sessions(talking(tokenizer, "three_turns"), asked) == sessions(talking(tokenizer, "three_turns"), agents)


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("import sys; sys.stdin.read(); print('so'); print(0.5)", 0.5),
        ("print()", None),
        ("print('None')", None),
        ("print('x' * 2**20); print(2)", 2.0),
        ("print('good')", "last line is 'good'; expected a number (the reward) or none"),
        ("import sys; sys.exit('no idea')", "the program ended with status 1: no idea"),
    ],
)
def test_a_program_s_last_line_is_its_reward(program, reward):
    command = AgentCommand(f"{sys.executable} -S -c {shlex.quote(program)}")
    if isinstance(reward, str):
        with pytest.raises(RuntimeError, match=re.escape(reward)):
            command({"prompt": "a"})
    else:
        assert command({"prompt": "a" * 2**20}) == reward


def test_an_agent_that_asks_for_what_it_is_not_given_is_refused_at_once():
    check_agent(sample_agents.sub_agents)
    with pytest.raises(UserError, match="has the parameter 'llm'; expected one of row, client, base_url, api_key"):
        check_agent(lambda row, llm: 0)
    with pytest.raises(UserError, match="agent_command is empty"):
        AgentCommand(" ")
    with pytest.raises(UserError, match="No closing quotation"):
        AgentCommand("python 'a")
    with pytest.raises(UserError, match=r"'my_agent.py' names a module or file, but no object in it; write my_agent.py:name"):
        imported_callable("my_agent.py", "agent")
    check_agent(AgentCommand(f"{sys.executable} my_agent.py"))
    with pytest.raises(UserError, match="the program 'pyhton' was not found"):
        check_agent(AgentCommand("pyhton my_agent.py"))


def no_way_out(row, client):
    """Says what an agent in an enclosure cannot do, and asks the policy."""
    refused = []
    for attempt in (
        lambda: socket.create_connection(("192.0.2.1", 80), 1),
        lambda: socket.socket(40),  # AF_VSOCK, which knows no namespaces
        lambda: Path("written").write_text("a"),
    ):
        try:
            attempt()
        except OSError as error:
            refused.append(error.strerror)
    sample_agents.once(row, client)
    raise ValueError(refused)


@pytest.mark.slow
@pytest.mark.needs("bubblewrap")
def test_an_agent_in_an_enclosure_reaches_the_policy_and_nothing_else(tokenizer):
    gateway = AgentGateway(tunnel=True)
    enclosure = enclosure_of_workers((gateway.tunnel, str(Path(__file__).parents[2])), sockets=True)
    with closing(Agents(AgentPool(no_way_out, workers=1, enclosure=enclosure), gateway)) as asked:
        for t in sessions(talking(tokenizer), asked):
            assert t.turns == 1 and t.completion.ids
            assert "['Network is unreachable', 'Operation not permitted', 'Read-only file system']" in t.reason
