"""The demo's promise, kept over seeds: `make test-long`."""

from __future__ import annotations

import json

import pytest

from psigrad_extras import demo


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rl_goes_past_the_demonstrations(seed, tmp_path):
    result = demo.run(str(tmp_path / "demo"), seed, progress=False)
    rows = {row["name"]: row for row in json.loads((result.folder / "summary.json").read_text())["rows"]}
    for how in ("", ", greedy"):
        assert rows[f"accuracy after SFT{how}"]["value"] <= 0.6
        assert rows[f"accuracy after RL{how}"]["value"] >= 0.9
    assert rows["wall time"]["value"] < 360
    data = tmp_path / "demo" / "data"
    words = [{json.loads(line)["prompt"] for line in (data / f"{name}.jsonl").open()} for name in ("prompts", "held_out")]
    assert not words[0] & words[1]
