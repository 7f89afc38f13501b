from dataclasses import asdict

import pytest

from verl.config import PPOConfig
from verl.monitor.redact import REDACTED, redact, redact_argument
from verl.monitor.trackers import flatten

SECRETS = "hf_token HF_TOKEN accessToken api_tokens api_key OPENAI_API_KEY apiKey api-key judge.apikey wandb_api_key"
SECRETS += " password db_passwd client_secret secret_access_key auth credentials private_key"


@pytest.mark.parametrize("key", SECRETS.split())
def test_secrets_are_hidden_wherever_they_lie(key):
    config = {
        "reward": {"function": {"kwargs": {key: "hunter2", "more": [{key: ["hunter2"]}, {key: {"a": "hunter2"}}]}}}
    }
    assert "hunter2" not in repr(redact(config))
    assert redact(config)["reward"]["function"]["kwargs"][key] == REDACTED
    assert config["reward"]["function"]["kwargs"][key] == "hunter2", "the settings themselves stay"


def test_numbers_under_a_password_are_hidden_and_logins_in_urls():
    hidden = redact({"password": 12345, "urls": ["https://bob:hunter2@host:8080/x?y=a@b", "https://host/x@y"]})
    assert hidden == {"password": REDACTED, "urls": [f"https://{REDACTED}@host:8080/x?y=a@b", "https://host/x@y"]}


@pytest.mark.parametrize("key", SECRETS.split())
@pytest.mark.parametrize("form", ["+a.{}=", "a={{b:1,{}:", "a={{'{}': ", "--{}="])
def test_command_lines_lose_what_follows_a_secret_key(key, form):
    before = form.format(key)
    for value in ("hunter2", "[hunter2, hunter2]", "'hunter2 hunter2'"):
        assert redact_argument(before + value).removesuffix(REDACTED).rstrip() == before.rstrip()


def test_other_arguments_stay():
    arguments = ["train_ppo.py", "--config", "configs/ppo.yaml", "actor.optim.lr=1e-6", "data.train_files=[a.jsonl,b]"]
    assert [redact_argument(argument) for argument in arguments] == arguments
    assert redact_argument("x.url=https://bob:hunter2@host/") == f"x.url=https://{REDACTED}@host/"


def test_no_setting_of_ours_is_taken_for_a_secret():
    """max_tokens, stop_token_ids, tokenizer_path, prompt_key ... look like secrets to a careless rule."""
    config = asdict(PPOConfig())
    config["model"]["tokenizer_path"] = "some/folder"
    config["rollout"]["stop_token_ids"] = [2, 3]
    assert redact(config) == config


def test_flat_settings_are_plain():
    flat = flatten({"a": {"b": {"c": 1}, "d": [1, 2]}, "e": None, "f": PPOConfig().model.path, "g": True})
    assert flat == {"a.b.c": 1, "a.d": "[1, 2]", "e": "null", "f": "???", "g": True}
    assert {type(value) for value in flatten(asdict(PPOConfig())).values()} <= {bool, int, float, str}
