"""Answers of the real verl (`verl.trainer.ppo.core_algos`), which runs in an environment of its own (run.sh)."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import Case, write_expected
from torch import Tensor

from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

AGGREGATIONS = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
}
NO_DUAL_CLIP = 1e9  # it cannot be turned off


def oracle(case: Case) -> dict[str, Tensor | float]:
    answers = gae(case) | policy(case) | value(case) | kl(case) | mismatch(case)
    return answers | group(case) if case.all_scored else answers


def gae(case: Case) -> dict[str, Tensor | float]:
    mask = case["mask"].double()
    whitened, returns = core_algos.compute_gae_advantage_return(
        case["rewards"], case["values"], mask, case.settings["gamma"], case.settings["lam"]
    )
    return {
        "gae/returns": returns * mask,
        "gae/advantages": (returns - case["values"]) * mask,  # they come back whitened only
        "gae/whitened": whitened * mask,
    }


def policy(case: Case) -> dict[str, Tensor | float]:
    answers: dict[str, Tensor | float] = {}
    for name, clip_c in (("policy", NO_DUAL_CLIP), ("dual_clip", case.settings["clip_c"])):
        for mode, their_mode in AGGREGATIONS.items():
            logprobs = case["logprobs"].clone().requires_grad_()
            loss, clipped, _, clipped_lower = core_algos.compute_policy_loss(
                case["old_logprobs"],
                logprobs,
                case["advantages"],
                case["mask"].double(),
                cliprange_low=case.settings["clip_low"],
                cliprange_high=case.settings["clip_high"],
                clip_ratio_c=clip_c,
                loss_agg_mode=their_mode,
            )
            answers[f"{name}/{mode}/loss"] = loss
            answers[f"{name}/{mode}/gradient"] = torch.autograd.grad(loss, logprobs)[0]
        answers[f"{name}/clipped"], answers[f"{name}/clipped_lower"] = clipped, clipped_lower
    return answers


def value(case: Case) -> dict[str, Tensor | float]:
    answers: dict[str, Tensor | float] = {}
    for mode, their_mode in AGGREGATIONS.items():
        values = case["new_values"].clone().requires_grad_()
        loss, clipped = core_algos.compute_value_loss(
            values,
            case["returns"],
            case["values"],
            case["mask"].double(),
            case.settings["clip_value"],
            loss_agg_mode=their_mode,
        )
        answers[f"value/{mode}/loss"] = loss
        answers[f"value/{mode}/gradient"] = torch.autograd.grad(loss, values)[0]
        answers["value/clipped"] = clipped
    return answers


def kl(case: Case) -> dict[str, Tensor | float]:
    answers: dict[str, Tensor | float] = {}
    for estimator in ("k1", "k2", "k3"):
        answers[f"kl/{estimator}"] = core_algos.kl_penalty(case["logprobs"], case["ref_logprobs"], estimator)
        logprobs = case["logprobs"].clone().requires_grad_()
        straight_through = core_algos.kl_penalty(logprobs, case["ref_logprobs"], f"{estimator}+")
        answers[f"kl/{estimator}/straight_through/gradient"] = torch.autograd.grad(straight_through.sum(), logprobs)[0]
    settings = case.settings
    controller = core_algos.AdaptiveKLController(settings["kl_coef"], settings["target_kl"], settings["horizon"])
    coefs = []
    for observed, num_sequences in case["kl_updates"].tolist():
        controller.update(observed, num_sequences)
        coefs.append(float(controller.value))
    return answers | {"kl/adaptive_coefs": torch.tensor(coefs, dtype=torch.float64)}


def mismatch(case: Case) -> dict[str, Tensor | float]:
    log_ratio, cap = case["old_logprobs"] - case["rollout_logprobs"], case.settings["mismatch_cap"]
    thresholds: dict[str, Any] = {"truncate": cap, "mask": f"{1 / cap}_{cap}"}
    return {
        f"mismatch/{mode}": compute_rollout_correction_weights(
            log_ratio, case["mask"].double(), rollout_is="token", rollout_is_threshold=threshold
        )[0]
        for mode, threshold in thresholds.items()
    }


def group(case: Case) -> dict[str, Tensor | float]:
    mask, size = case["mask"].double(), case.settings["group_size"]
    groups = np.arange(len(mask)) // size
    first = case["mask"].long().argmax(dim=1, keepdim=True)  # they spread a row's advantage over its trainable tokens

    def scores() -> Tensor:
        return torch.zeros_like(mask).scatter(1, first, case["scores"][:, None])

    answers = {
        "grpo": core_algos.compute_grpo_outcome_advantage(scores(), mask, groups),
        "grpo_without_std": core_algos.compute_grpo_outcome_advantage(
            scores(), mask, groups, norm_adv_by_std_in_grpo=False
        ),
        "rloo": core_algos.compute_rloo_outcome_advantage(scores(), mask, groups),
        "grpo_groups_of_one": core_algos.compute_grpo_outcome_advantage(scores(), mask, np.arange(len(mask))),
        "rloo_groups_of_one": core_algos.compute_rloo_outcome_advantage(scores(), mask, np.arange(len(mask))),
    }
    return {f"group/{name}": advantages.gather(1, first).squeeze(1) for name, (advantages, _) in answers.items()}


if __name__ == "__main__":
    write_expected("verl", oracle)
