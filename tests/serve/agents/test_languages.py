"""The agents of examples/agents, in three languages and two APIs: one and the same session, token for token."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from in_memory import make, rollout_of

from psigrad.importing import imported_callable
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import CHATML, prompt_ids
from psigrad.language.models import tiny
from psigrad.language.rollout.types import Prompt
from psigrad.language.training.online.collect import completion_seed
from psigrad_serve.agents.agent_gateway import AgentGateway
from psigrad_serve.agents.agent_rollouts import AgentPool, Agents
from psigrad_serve.agents.agent_worker import AgentCommand

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "agents"
PROGRAMS = {
    "curl": f"bash {EXAMPLES}/count.sh",
    "node": f"node {EXAMPLES}/count.mjs",
    "anthropic": f"{sys.executable} {EXAMPLES}/count_anthropic.py",
}


def sessions(agent):
    """Two sessions on a row, by a model that draws of few tokens."""
    tokenizer = tiny.tokenizer(["count from more user assistant"], 300)
    tokenizer.chat_template = CHATML
    run = make(tokenizer, "grpo", max_length=256)
    row = Row("x", prompt=[{"role": "user", "content": "count from 3"}], columns={"start": "3"})
    prompts = [Prompt(0, tuple(prompt_ids(tokenizer, row)), row)]
    with closing(Agents(AgentPool(agent, workers=1), AgentGateway())) as agents:
        params = replace(run.params, max_tokens=4, stop_token_ids=(tokenizer.eos_token_id,))
        return rollout_of(run.sampler, run.model, None, agents)(prompts, params, 2, partial(completion_seed, 0, 0), version=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param("curl", marks=pytest.mark.needs("curl")), pytest.param("node", marks=pytest.mark.needs("node")), "anthropic"],
)
def test_a_program_in_any_language_has_the_session_of_the_function(name):
    own = sessions(imported_callable(f"{EXAMPLES}/my_agent.py:solve", "agent"))
    assert all(not one.reason and sum(one.mask) == 12 for one in own), "three turns of four tokens"
    assert sessions(AgentCommand(PROGRAMS[name])) == own


def test_the_function_is_that_of_the_page_and_the_page_names_the_programs():
    page = (ROOT / "docs" / "agents.md").read_text()
    agent = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert (EXAMPLES / "my_agent.py").read_text().endswith(agent)
    for command in PROGRAMS.values():
        assert (EXAMPLES / Path(shlex.split(command)[1]).name).is_file() and Path(shlex.split(command)[1]).name in page
