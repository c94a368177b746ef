"""Eight programs that people bring, each as its own pages show it: a task with two rounds of tools, and the reward of its answer.

A person's box has a number, and the box with that number holds something. Each function runs as `--agent` or alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}


class Boxes:
    """The tools, and which of them were used."""

    def __init__(self, row):
        self.row, self.used = row, []

    def find_box(self, owner: str) -> str:
        """Tell the mark of a person's box.

        Args:
            owner: The person.
        """
        self.used.append("find_box")
        return self.row["mark"] if owner == self.row["owner"] else "nobody"

    def open_box(self, mark: str) -> str:
        """Open the box with this mark.

        Args:
            mark: The mark of the box.
        """
        self.used.append("open_box")
        return self.row["inside"] if mark == self.row["mark"] else "no such box"

    def schemas(self, form):
        """Both tools by hand, for clients that take JSON."""
        for function, name in ((self.find_box, "owner"), (self.open_box, "mark")):
            properties = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
            yield form(function.__name__, function.__doc__.partition("\n")[0], properties)

    def judge(self, answer) -> float:
        """1 for the right answer after both tools."""
        return float(self.row["inside"] in str(answer) and self.used == ["find_box", "open_box"])


def question(row) -> str:
    return f"What is in the box of {row['owner']}?"


def openai_agents(row, base_url, api_key):
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    boxes = Boxes(row)

    async def play():
        # by default all sessions of a process share the client of the first, and so its address
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            tools = [function_tool(boxes.find_box), function_tool(boxes.open_box)]
            agent = Agent("boxes", tools=tools, model=OpenAIResponsesModel("policy", client))
            return (await Runner.run(agent, question(row), max_turns=4)).final_output

    return boxes.judge(asyncio.run(play()))


def smolagents(row, base_url, api_key):
    from smolagents import OpenAIModel, Tool, ToolCallingAgent

    boxes = Boxes(row)

    def tool(function, name):
        kind = {"name": function.__name__, "description": function.__doc__.partition("\n")[0], "output_type": "string"}
        kind |= {"inputs": {name: {"type": "string", "description": f"The {name}."}}, "skip_forward_signature_validation": True}
        return type("Made", (Tool,), {**kind, "forward": lambda self, **given: function(**given)})()

    # by default it forces each call, and what is forced is not trained
    model = OpenAIModel("policy", api_base=base_url, api_key=api_key, tool_choice="auto")
    tools = [tool(boxes.find_box, "owner"), tool(boxes.open_box, "mark")]
    return boxes.judge(ToolCallingAgent(tools, model, max_steps=4, verbosity_level=0).run(question(row)))


def pydantic_ai(row, base_url, api_key):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    boxes, provider = Boxes(row), OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = Agent(OpenAIChatModel("policy", provider=provider), tools=[boxes.find_box, boxes.open_box])
    return boxes.judge(agent.run_sync(question(row)).output)


def langgraph(row, base_url, api_key):
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    boxes, model = Boxes(row), ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    agent = create_react_agent(model, [boxes.find_box, boxes.open_box])
    return boxes.judge(agent.invoke({"messages": [("user", question(row))]})["messages"][-1].content)


def autogen(row, base_url, api_key):
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import ModelInfo
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    boxes = Boxes(row)
    info = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)
    client = OpenAIChatCompletionClient(model="policy", base_url=base_url, api_key=api_key, model_info=info)
    agent = AssistantAgent("boxes", client, tools=[boxes.find_box, boxes.open_box], max_tool_iterations=4)
    return boxes.judge(asyncio.run(agent.run(task=question(row))).messages[-1].to_text())


def mini_swe_agent(row, base_url, api_key):
    """It has a shell alone: the boxes are files."""
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    templates = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, row["owner"]).write_text(row["mark"])
        Path(folder, row["mark"]).write_text(row["inside"])
        endpoint = {"api_base": base_url, "api_key": api_key}
        model = LitellmModel(model_name="openai/policy", model_kwargs=endpoint, observation_template="{{ output.output }}")
        done = DefaultAgent(model, LocalEnvironment(cwd=folder), **templates, step_limit=4).run(question(row))
    return float(done["submission"].strip() == row["inside"])


def litellm(row, base_url, api_key):
    from litellm import completion

    boxes, messages = Boxes(row), [{"role": "user", "content": question(row)}]
    tools = boxes.schemas(lambda name, text, properties: {
        "type": "function", "function": {"name": name, "description": text, "parameters": properties}})  # fmt: skip
    tools = list(tools)
    for _ in range(4):
        asked = {"model": "openai/policy", "messages": messages, "tools": tools, "api_base": base_url, "api_key": api_key}
        message = completion(**asked).choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = getattr(boxes, call.function.name)(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
    return boxes.judge(message.content)


def anthropic(row, base_url, api_key):
    from anthropic import Anthropic, beta_tool

    boxes, client = Boxes(row), Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    asked = [{"role": "user", "content": question(row)}]
    tools = [beta_tool(boxes.find_box), beta_tool(boxes.open_box)]
    runner = client.beta.messages.tool_runner(model="policy", max_tokens=200, messages=asked, tools=tools, max_iterations=4)
    return boxes.judge(list(runner)[-1].content[-1].text)


PROGRAMS = (openai_agents, smolagents, pydantic_ai, langgraph, autogen, mini_swe_agent, litellm, anthropic)


def of_row(row, base_url, api_key):
    """The program that the row names."""
    return globals()[row["program"]](row, base_url, api_key)
