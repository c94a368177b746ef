"""What YAML and text say of settings: dates, numbers, objects, merges."""

from __future__ import annotations

from psigrad.config import OnlineConfig, SFTConfig
from psigrad.config.load import load


def test_text_that_looks_like_something_else_stays_text():
    config = load(OnlineConfig, overrides=["run.output_dir=2024", "data.dataset=3", "model.path=1e5", "evaluation.metric="])
    assert (config.run.output_dir, config.data.dataset, config.model.path, config.evaluation.metric) == ("2024", "3", "1e5", "")
    assert load(OnlineConfig, overrides=["optim.learning_rate=1e-5"]).optim.learning_rate == 1e-5


def test_a_date_in_a_file_is_text_and_what_is_merged_may_be_given_anew(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(
        "model: {path: m}\nrun: {output_dir: 2024-13-45}\ndata: {dataset: 2024-01-05}\n"
        "optim: &usual\n  <<: {learning_rate: 1e-3, weight_decay: 0.1}\n  learning_rate: 1e-4\n"
    )
    config = load(SFTConfig, file)
    assert (config.run.output_dir, config.data.dataset) == ("2024-13-45", "2024-01-05")
    assert (config.optim.learning_rate, config.optim.weight_decay) == (1e-4, 0.1)


def test_json_and_yaml_objects_are_read():
    kwargs = ['{"enable_thinking": false}', "{enable_thinking: false}"]
    assert [load(OnlineConfig, overrides=[f"model.chat_template_kwargs={k}"]).model.chat_template_kwargs for k in kwargs] == [
        {"enable_thinking": False}
    ] * 2
    assert load(OnlineConfig, overrides=["optim.learning_rate=1e-5", "reward={reward: length}"]).reward == ({"reward": "length"},)
