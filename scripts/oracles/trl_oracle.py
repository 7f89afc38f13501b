"""Answers of TRL's callable parts. Its GAE and PPO losses are statements inside `PPOTrainer.train`."""
# pyright: reportMissingImports=false

from __future__ import annotations

from cases import Case, write_expected
from torch import Tensor
from trl.experimental.ppo.ppo_trainer import masked_whiten
from trl.trainer.utils import nanstd


def oracle(case: Case) -> dict[str, Tensor | float]:
    mask = case["mask"]
    groups = case["scores"].view(-1, case.settings["group_size"])
    return {
        "whitened": masked_whiten(case["advantages"], mask.double()) * mask,
        "group/std": nanstd(groups, dim=1),
    }


if __name__ == "__main__":
    write_expected("trl", oracle)
