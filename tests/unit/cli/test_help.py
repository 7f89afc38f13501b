"""--help says every setting, its default and what it means."""

from verl.cli.help import help_text
from verl.config import PPOConfig, leaves


def test_every_setting_with_its_default_is_listed():
    lines = [line.strip() for line in help_text().splitlines()]
    names = [line.partition("=")[0] for line in lines if "=" in line]
    assert [name for name, _ in leaves(PPOConfig()) if name not in names] == []


def test_a_setting_as_it_is_shown():
    text = help_text()
    assert "  actor.optim.lr=1e-06\n      Peak learning rate of AdamW.\n" in text
    assert "  critic.optim.lr=1e-05\n" in text  # the default of the place, not of the class
    assert "  critic.optim.betas=[0.9,0.999]\n" in text
    assert "  algorithm.kl_penalty=k1   (k1 | k2 | k3)\n" in text
    assert "  rollout.val.temperature=1.0\n      Softmax temperature; 0 is greedy." in text  # of an inherited field
    assert "  model.tokenizer_path=null\n" in text
    assert "\nalgorithm.kl_ctrl: Coefficient of the KL penalty in the reward.\n" in text


def test_lines_fit_a_terminal():
    assert max(map(len, help_text().splitlines())) <= 120
