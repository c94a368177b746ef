"""The tinker package, unmodified, against psigrad's server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import tinker
import torch
from tinker import types

from psigrad.language.models import tiny
from psigrad.language.models.packing import Groups
from psigrad_serve.serving import running
from psigrad_serve.tinker_api import TinkerServer

pytestmark = pytest.mark.tinker


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker")
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    network = tiny.model("qwen3", len(tokenizer), max_length=512, tied=False)
    with torch.no_grad():
        network.get_output_embeddings().weight.mul_(10)  # logits that differ: then the best policy is within reach
    network.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    made = TinkerServer(str(folder / "base"), "tiny", folder / "states")
    with running(made, "tml-key") as at:
        yield made, at
    made.close()


@pytest.fixture(scope="module")
def service(server):
    return tinker.ServiceClient(base_url=server[1].url, api_key="tml-key")


@pytest.fixture(scope="module")
def training(service):
    return service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()


IDS = [5, 9, 30, 12, 7, 44, 101, 9]
TEXT = types.ModelInput.from_ints(IDS[:-1])


def example(**numbers):
    return types.Datum(model_input=TEXT, loss_fn_inputs={"target_tokens": IDS[1:], **(numbers or {"weights": [1.0] * 7})})


def weights(server, client):
    return [p.detach().clone() for p in server[0].models[client.model_id].model.trainable().values()]


def test_supervised_steps_lower_the_loss_and_a_state_resumes_bitwise(server, service, training):
    losses = []
    for _ in range(6):
        step = training.forward_backward([example()], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        losses.append(step.result().metrics["loss:sum"])
    assert losses[-1] < 0.9 * losses[0]
    saved = training.save_state("six").result()
    again = service.create_training_client_from_state_with_optimizer(saved.path).result()
    for client in (training, again):
        client.forward_backward([example()], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    assert all(map(torch.equal, weights(server, training), weights(server, again)))


def expected(model, good) -> float:
    """The probability of a good token behind the prompt."""
    with torch.no_grad():
        every = [(token,) for token in range(model.vocabulary)]
        return float(model.evaluate(Groups([IDS[:3]], [every])).logp[:, 0].exp()[good].sum())


def paid_tokens(model, seed: int):
    """Half of the tokens, those on one side of the head, which the policy says half of the time."""
    rows, rng = model.network.get_output_embeddings().weight.detach(), torch.Generator().manual_seed(seed)
    drawn = (rows @ torch.randn(64, generator=rng) > 0 for _ in range(200))
    return next(one for one in drawn if 0.4 < expected(model, one) < 0.6)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_rl_goes_to_the_optimum_and_its_controls_do_not(server, service, seed):
    """Half of the tokens are paid with 1, so the best policy has 1. Without a rate nothing moves; paid with -1, they vanish."""

    def learn(lr: float, sign: float = 1.0) -> tuple[float, float]:
        training = service.create_lora_training_client(base_model="tiny", rank=8, seed=seed).result()
        model = server[0].models[training.model_id].model
        good = paid_tokens(model, seed)
        begin = expected(model, good)
        for step in range(12):
            sampler = training.save_weights_and_get_sampling_client().result()
            asked = types.SamplingParams(max_tokens=1, seed=100 * seed + step)
            found = sampler.sample(types.ModelInput.from_ints(IDS[:3]), num_samples=64, sampling_params=asked).result().sequences
            rewards = torch.tensor([sign * float(good[one.tokens[0]]) for one in found])
            advantages = rewards - rewards.mean()
            data = []
            for one, advantage in zip(found, advantages.tolist(), strict=True):
                numbers = {"logprobs": [0.0, 0.0, *one.logprobs], "advantages": [0.0, 0.0, advantage]}
                inputs = {"target_tokens": [0, 0, *one.tokens], **numbers}
                data.append(types.Datum(model_input=types.ModelInput.from_ints(IDS[:3]), loss_fn_inputs=inputs))
            done = training.forward_backward(data, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=lr)).result()
            own = done.result().loss_fn_outputs[0]["logprobs"].tolist()
            assert own[2:] == pytest.approx(list(found[0].logprobs), abs=1e-4), "on-policy means ratio 1"
        return begin, expected(model, good)

    begin, end = learn(1e-2)
    assert 0.4 < begin < 0.6 and end > 0.95
    assert learn(0.0) == (begin, begin)
    assert learn(1e-2, sign=-1.0)[1] < 0.05


def serving(folder: Path) -> tuple[subprocess.Popen, str]:
    """A server of its own, as the command starts it, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "psigrad", "serve", str(folder / "base"), "--tinker", "--name", "tiny"]
    command += ["--state", str(folder / "kept"), "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, env={**os.environ, "PSIGRAD_SERVE_TOKEN": "tml-key"}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and "psigrad serve" in process.stdout.readline()
    return process, f"http://127.0.0.1:{port}"


def test_a_session_goes_on_to_the_same_bits_on_a_server_that_was_killed(server):
    folder, kept = server[0].folder.parent, []

    def train(client, steps: int) -> list[float]:
        for _ in range(steps):
            client.forward_backward([example()], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return client.forward([example()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()

    for begins in (True, False):
        process, url = serving(folder)
        try:
            service = tinker.ServiceClient(base_url=url, api_key="tml-key")
            if begins:
                training = service.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
                train(training, 3)
                path = training.save_state("three").result().path
                kept.append(train(training, 2))
            else:
                kept.append(train(service.create_training_client_from_state_with_optimizer(path).result(), 2))
                kept.append(train(service.create_training_client_from_state(path).result(), 2))
        finally:
            process.kill()
            process.wait()
    whole, again, without = kept
    assert whole == again != without


def test_a_retried_call_is_applied_once(server, training):
    body = {"adam_params": types.AdamParams().model_dump(), "model_id": training.model_id, "seq_id": 999}
    training.forward_backward([example()], "cross_entropy").result()
    found = []
    for _ in range(2):
        head = {"X-API-Key": "tml-key"}
        name = requests.post(f"{server[1].url}/api/v1/optim_step", json=body, headers=head).json()["request_id"]
        requests.post(f"{server[1].url}/api/v1/retrieve_future", json={"request_id": name}, headers=head).raise_for_status()
        found.append(weights(server, training))
    assert all(map(torch.equal, *found))


def test_log_probs_of_a_prompt_and_custom_losses(service, training):
    base = service.create_sampling_client(base_model="tiny").result()
    found = base.compute_logprobs(TEXT).result()
    assert found[0] is None and all(value < 0 for value in found[1:])
    made = training.forward_backward_custom([example()], lambda data, logprobs: (-logprobs[0].sum(), {"mine": 1.0})).result()
    plain = training.forward([example()], "cross_entropy").result()
    ranks = {"logprobs": 1, "weights": 1}
    loss = service.create_custom_loss(lambda logprobs, weights: (-(logprobs * weights).sum(), {}), ranks).result()
    traced = training.forward_backward_custom([example()], loss).result()
    assert traced.metrics["loss:sum"] == pytest.approx(made.metrics["loss:sum"], rel=1e-5)
    assert made.metrics["mine"] == 1.0 and plain.metrics["loss:sum"] == pytest.approx(made.metrics["loss:sum"], rel=1e-5)


def test_what_cannot_be_had_is_said(server, service, training):
    with pytest.raises(tinker.RequestFailedError, match="no loss 'gspo'"):
        training.forward_backward([example()], "gspo").result()
    with pytest.raises(tinker.NotFoundError, match="no base model"):
        service.create_lora_training_client(base_model="other").result()
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=server[1].url, api_key="tml-other").get_server_capabilities()
