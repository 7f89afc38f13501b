"""Our arithmetic against that of four public libraries, whose answers `scripts/oracles/` stored in `expected/`.

They are not four independent witnesses. verl says in its docstrings that its GAE, policy loss, value loss and KL
estimators are adapted or copied from TRL; its adaptive KL coefficient is OpenRLHF's line by line. Two derivations stand
apart: torchrl's, which computes GAE a second time as a convolution and clips logarithms of ratios, and the loops and
hand-computed numbers in tests/unit/algo.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.oracles.cases import FOLDER, INPUTS, SEED, Case, load
from verl.algo.advantages import GroupAdvantages, gae, grpo, rloo, whiten, whiten_moments
from verl.algo.aggregate import loss_counts, token_weights, weighted_sum
from verl.algo.kl import AdaptiveKL, kl_loss, kl_penalty
from verl.algo.losses import mismatch_weight, policy_loss, value_loss
from verl.config import KLEstimator, LossAggregation, MismatchCorrection

VERSIONS = {"verl": "0.9.1", "trl": "1.12.0", "torchrl": "0.14.1", "openrlhf": "0.11.2"}
CASES = {case.name: case for case in load()}
EXACT = 1e-9
ADDS_1E_8 = 2e-8
"""Where a library adds 1e-8 to a count that we divide by as it is: up to 1e-8 of a count of 1."""
FLOAT32 = 3e-6
"""OpenRLHF computes its KL estimates in float32."""

Answer = Tensor | float


@cache
def stored(library: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{library}.json").read_text())


def our_advantages(case: Case) -> dict[str, Answer]:
    mask = case["mask"]
    advantages, returns = gae(case["rewards"], case["values"], mask, case.settings["gamma"], case.settings["lam"])

    def whitened(x: Tensor) -> Tensor:
        return torch.zeros_like(x).masked_scatter(
            mask, whiten(x[mask], whiten_moments(x[mask], torch.ones(mask.sum())))
        )

    answers: dict[str, Answer] = {"gae/whitened": whitened(advantages), "whitened": whitened(case["advantages"])}
    for name in ("gae", "gae/loop", "gae/vectorised"):
        answers |= {f"{name}/advantages": advantages, f"{name}/returns": returns}
    return answers


def summed(case: Case, per_token: Tensor, mode: LossAggregation) -> Tensor:
    lengths, live = case["mask"].sum(dim=1), torch.ones(len(case["mask"]))
    return weighted_sum(per_token, token_weights(lengths, live, mode, *loss_counts(lengths, live).tolist()))


def with_gradient(case: Case, column: str, name: str, per_token: Callable[[Tensor], Tensor]) -> dict[str, Answer]:
    """Loss and gradient of each aggregation; `per_token` maps the packed column to losses [k]."""
    answers: dict[str, Answer] = {}
    for mode in LossAggregation:
        padded = case[column].clone().requires_grad_()
        loss = summed(case, per_token(padded[case["mask"]]), mode)
        answers[f"{name}/{mode}/loss"] = loss
        answers[f"{name}/{mode}/gradient"] = torch.autograd.grad(loss, padded)[0]
    return answers


def our_policy(case: Case) -> dict[str, Answer]:
    settings, mask = case.settings, case["mask"]
    old, advantages = case["old_logprobs"][mask], case["advantages"][mask]
    clips = settings["clip_low"], settings["clip_high"]
    answers: dict[str, Answer] = {}
    for name, clip_c in (("policy", None), ("dual_clip", settings["clip_c"])):
        answers |= with_gradient(
            case, "logprobs", name, lambda x, clip_c=clip_c: policy_loss(x, old, advantages, *clips, clip_c).loss
        )
        result = policy_loss(case["logprobs"][mask], old, advantages, *clips, clip_c)
        answers[f"{name}/clipped"] = result.clipped.double().mean()
        answers[f"{name}/clipped_lower"] = result.clipped_lower.double().mean()

    padded = case["logprobs"].clone().requires_grad_()
    per_token = policy_loss(padded[mask], old, advantages, *clips).loss
    answers["policy/token_losses"] = torch.zeros_like(padded).masked_scatter(mask, per_token)
    answers["policy/token_gradients"] = torch.autograd.grad(per_token.sum(), padded)[0]
    return answers


def our_mismatch(case: Case) -> dict[str, Answer]:
    settings, mask = case.settings, case["mask"]
    old, rollout, advantages = (case[name][mask] for name in ("old_logprobs", "rollout_logprobs", "advantages"))
    clips = settings["clip_low"], settings["clip_high"]
    answers: dict[str, Answer] = {}
    for mode in (MismatchCorrection.truncate, MismatchCorrection.mask):
        weight = mismatch_weight(old, rollout, mode, settings["mismatch_cap"])
        answers[f"mismatch/{mode}"] = torch.zeros_like(case["mask"], dtype=torch.float64).masked_scatter(mask, weight)
        answers |= with_gradient(
            case, "logprobs", str(mode), lambda x, w=weight: policy_loss(x, old, advantages, *clips).loss * w
        )
        answers[f"{mode}/clipped"] = (
            policy_loss(case["logprobs"][mask], old, advantages, *clips).clipped.double().mean()
        )
    return answers


def our_value(case: Case) -> dict[str, Answer]:
    mask, clip = case["mask"], case.settings["clip_value"]
    old, returns = case["values"][mask], case["returns"][mask]
    clipped = value_loss(case["new_values"][mask], old, returns, clip).clipped
    return with_gradient(case, "new_values", "value", lambda x: value_loss(x, old, returns, clip).loss) | {
        "value/clipped": clipped.double().mean()
    }


def our_kl(case: Case) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for estimator in KLEstimator:
        answers[f"kl/{estimator}"] = kl_penalty(case["logprobs"], case["ref_logprobs"], estimator)
        logprobs = case["logprobs"].clone().requires_grad_()
        loss = kl_loss(logprobs, case["ref_logprobs"], estimator, straight_through=True).sum()
        answers[f"kl/{estimator}/straight_through/gradient"] = torch.autograd.grad(loss, logprobs)[0]
    settings = case.settings
    controller = AdaptiveKL(settings["kl_coef"], settings["target_kl"], settings["horizon"])
    coefs = []
    for observed, num_sequences in case["kl_updates"].tolist():
        controller.update(observed, int(num_sequences))
        coefs.append(controller.coef)
    return answers | {"kl/adaptive_coefs": torch.tensor(coefs, dtype=torch.float64)}


def our_groups(case: Case) -> dict[str, Answer]:
    scores, size, live = case["scores"], case.settings["group_size"], torch.ones(len(case["scores"]))
    results: dict[str, GroupAdvantages] = {
        "grpo": grpo(scores, size, live, norm_by_std=True),
        "grpo_without_std": grpo(scores, size, live, norm_by_std=False),
        "rloo": rloo(scores, size, live),
        "grpo_groups_of_one": grpo(scores, 1, live, norm_by_std=True),
        "rloo_groups_of_one": rloo(scores, 1, live),
    }
    return {f"group/{name}": result.advantages for name, result in results.items()}


@cache
def ours(case_name: str) -> dict[str, Answer]:
    case = CASES[case_name]
    return (
        our_advantages(case) | our_policy(case) | our_mismatch(case) | our_value(case) | our_kl(case) | our_groups(case)
    )


def tolerance(library: str, name: str) -> float:
    if library == "openrlhf" and name in ("kl/k1", "kl/k2", "kl/k3"):
        return FLOAT32
    if library == "verl" and (name == "gae/whitened" or name.endswith(("/clipped", "/clipped_lower"))):
        return ADDS_1E_8
    if library in ("verl", "openrlhf") and "/seq_mean_token_mean/" in name:
        return ADDS_1E_8
    return EXACT


@pytest.mark.parametrize("library", VERSIONS)
def test_answers_are_of_the_pinned_version_to_the_present_cases(library: str):
    data = stored(library)
    assert (data["library"], data["version"], data["seed"]) == (library, VERSIONS[library], SEED)
    assert data["cases_sha256"] == hashlib.sha256(INPUTS.read_bytes()).hexdigest(), "run scripts/oracles/run.sh again"
    assert set(data["expected"]) == set(CASES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("library", ["verl", "torchrl", "openrlhf"])
def test_answers_agree(library: str, case: str):
    expected = stored(library)["expected"][case]
    assert len(expected) >= 3
    for name, answer in expected.items():
        torch.testing.assert_close(
            torch.as_tensor(ours(case)[name], dtype=torch.float64).detach(),
            torch.tensor(answer, dtype=torch.float64),
            rtol=tolerance(library, name),
            atol=tolerance(library, name),
            msg=lambda text, name=name: f"{name} differs from {library}'s: {text}",
        )


@pytest.mark.parametrize("case", CASES)
def test_trl_whitens_the_same(case: str):
    expected = torch.tensor(stored("trl")["expected"][case]["whitened"], dtype=torch.float64)
    torch.testing.assert_close(ours(case)["whitened"], expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("case", CASES)
def test_group_deviation_is_that_of_trl_which_leaves_missing_scores_out_too(case: str):
    std = torch.tensor(stored("trl")["expected"][case]["group/std"], dtype=torch.float64)
    scores = CASES[case]["scores"].view(len(std), -1)
    expected = (scores - scores.nanmean(dim=1, keepdim=True)) / (std[:, None] + 1e-6)
    torch.testing.assert_close(ours(case)["group/grpo"], expected.flatten().nan_to_num(0.0), rtol=EXACT, atol=EXACT)


def test_cases_reach_what_they_are_for():
    """A comparison in which nothing is clipped, capped, missing or equal would say little."""
    assert ours("ragged")["policy/clipped"] > 0.1 and ours("ragged")["value/clipped"] > 0.1
    assert ours("far_off_policy")["dual_clip/clipped_lower"] > 0.02
    assert ours("on_policy_equal_scores")["policy/clipped"] == 0
    weights = ours("long")["mismatch/mask"][CASES["long"]["mask"]]
    assert (weights == 0).any() and (weights > 1).any()
    assert (ours("long")["mismatch/truncate"] == 2.0).any()
    assert CASES["missing_scores"]["scores"].isnan().sum() == 2
    assert not CASES["gaps"].right_padded
