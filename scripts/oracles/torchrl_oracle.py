"""Answers of torchrl."""
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from cases import Case, write_expected
from torch import Tensor
from torchrl.objectives.llm import GRPOLoss, k3_kl_token_estimate
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    vec_generalized_advantage_estimate,
)


def oracle(case: Case) -> dict[str, Tensor | float]:
    answers = policy(case) | {"kl/k3": k3_kl_token_estimate(case["ref_logprobs"], case["logprobs"])}  # target first
    return answers | gae(case) if case.right_padded else answers


def gae(case: Case) -> dict[str, Tensor | float]:
    mask, values = case["mask"], case["values"]
    done = torch.zeros_like(mask).scatter(1, mask.sum(dim=1, keepdim=True) - 1, True)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    columns = [x.unsqueeze(-1) for x in (values, next_values, case["rewards"], done)]  # time is the last but one
    answers: dict[str, Tensor | float] = {}
    for name, function in (
        ("loop", generalized_advantage_estimate),
        ("vectorised", vec_generalized_advantage_estimate),
    ):
        results = function(case.settings["gamma"], case.settings["lam"], *columns, terminated=columns[3])
        advantages, returns = (x.squeeze(-1) * mask for x in results)
        answers |= {f"gae/{name}/advantages": advantages, f"gae/{name}/returns": returns}
    return answers


def policy(case: Case) -> dict[str, Tensor | float]:
    """Per token; it clips the logarithm of the ratio."""
    loss = GRPOLoss(clip_epsilon=(case.settings["clip_low"], case.settings["clip_high"]))
    log_ratio = (case["logprobs"] - case["old_logprobs"]).requires_grad_()
    objective, _ = loss._compute_policy_objective(log_ratio, case["advantages"])
    return {
        "policy/token_losses": objective,
        "policy/token_gradients": torch.autograd.grad(objective.sum(), log_ratio)[0],
    }


if __name__ == "__main__":
    write_expected("torchrl", oracle)
