"""A teacher behind a server: it teaches what one in the process does."""

from __future__ import annotations

import contextlib

import pytest
from teachers import BY_TEXT, distil, make_foreign, make_same, metrics

from psigrad.language.models.language_model import load


@contextlib.contextmanager
def serving(model, *names):
    from psigrad_serve.engine.engine import SamplingEngine
    from psigrad_serve.served import Served
    from psigrad_serve.serving import running

    engine = SamplingEngine(model, max_batch=8)
    with running(Served(engine, names)) as at:
        yield at
    engine.close()


@pytest.fixture(scope="module")
def folder(job, tmp_path_factory):
    found = tmp_path_factory.mktemp("teachers")
    make_same(job, found / "teacher")
    return found


@pytest.fixture(scope="module")
def server(folder):
    with serving(load(str(folder / "teacher")), "teacher") as at:
        yield at


@pytest.fixture(scope="module")
def foreign(folder):
    return make_foreign(folder / "foreign")


def test_a_teacher_behind_a_server_teaches_what_one_in_the_process_does(job, folder, server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", server.token)
    here = metrics(distil(job, tmp_path / "here", 3, reference=str(folder / "teacher")), "kl")
    there = metrics(distil(job, tmp_path / "there", 20, reference=f"{server.url}/v1"), "kl")
    # 20 of 270 tokens, so a lower bound; a whole vocabulary is more than a server tells of
    assert 0 < there[0] < here[0] and sum(there[-4:]) / 4 < 0.8 * there[0]
    fewer = metrics(
        distil(job, tmp_path / "fewer", 1, reference=f"{server.url}/v1", reference_model="teacher", reference_top_k=3), "kl"
    )
    assert 0 < fewer[0] < there[0]
    sampled = {"preset": "distill", "kl": {"estimator": "k1+", "where": "loss", "coefficient": 1.0}}
    ours, theirs = (
        metrics(distil(job, tmp_path / name, 2, reference=at, algorithm=sampled), "kl")
        for name, at in (("k1 here", str(folder / "teacher")), ("k1 there", f"{server.url}/v1"))
    )
    assert theirs == pytest.approx(ours, abs=1e-5)


def test_a_foreign_teacher_behind_a_server_says_what_it_says_here(job, foreign, tmp_path, monkeypatch):
    here = metrics(distil(job, tmp_path / "here", 2, reference=foreign, algorithm=BY_TEXT), "kl")
    with serving(load(foreign), "other") as at:
        monkeypatch.setenv("OPENAI_API_KEY", at.token)
        asked = {"reference": f"{at.url}/v1", "reference_tokenizer": foreign, "algorithm": BY_TEXT}
        assert metrics(distil(job, tmp_path / "there", 2, **asked), "kl") == pytest.approx(here, abs=1e-4)
