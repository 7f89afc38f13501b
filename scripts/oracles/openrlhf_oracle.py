"""Answers of OpenRLHF. Its modules import packages at their top that its arithmetic does not use: stand-ins do."""
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import torch
from cases import Case, write_expected
from torch import Tensor


class StandIns(MetaPathFinder, Loader):
    """Modules in which every name exists and does nothing."""

    packages = ("aiohttp", "deepspeed", "flash_attn", "ray", "torchdata", "vllm")

    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.packages else None

    def create_module(self, spec):
        return MagicMock(name=spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, StandIns())

from openrlhf.models.loss import PolicyLoss, ValueLoss  # noqa: E402
from openrlhf.models.utils import compute_approx_kl  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController  # noqa: E402

AGGREGATIONS = {"token_mean": True, "seq_mean_token_mean": False}  # its token_level_loss


def oracle(case: Case) -> dict[str, Tensor | float]:
    answers = policy(case) | value(case) | kl(case)
    return answers | gae(case) if case.right_padded else answers  # it steps through gaps


def gae(case: Case) -> dict[str, Tensor | float]:
    no_self = None  # the method uses none
    advantages, returns = RemoteExperienceMaker.get_advantages_and_returns(
        no_self, case["values"], case["rewards"], case["mask"].double(), case.settings["gamma"], case.settings["lam"]
    )
    return {"gae/advantages": advantages * case["mask"], "gae/returns": returns * case["mask"]}


def policy(case: Case) -> dict[str, Tensor | float]:
    settings, mask = case.settings, case["mask"].double()
    cap = settings["mismatch_cap"]
    variants = {
        "policy": {},
        "dual_clip": {"dual_clip": settings["clip_c"]},
        "truncate": {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0, cap]},
        "mask": {
            "is_correction_level": "token",
            "is_correction_mode": "mask",
            "is_correction_threshold": [1 / cap, cap],
        },
    }
    answers: dict[str, Tensor | float] = {}
    for name, options in variants.items():
        for mode, by_token in AGGREGATIONS.items():
            loss_of = PolicyLoss(settings["clip_low"], settings["clip_high"], token_level_loss=by_token, **options)
            logprobs = case["logprobs"].clone().requires_grad_()
            loss, clipped, *_ = loss_of(  # new log-probs before old ones
                logprobs, case["old_logprobs"], case["advantages"], mask, rollout_log_probs=case["rollout_logprobs"]
            )
            answers[f"{name}/{mode}/loss"] = loss
            answers[f"{name}/{mode}/gradient"] = torch.autograd.grad(loss, logprobs)[0]
            answers[f"{name}/clipped"] = clipped
    return answers


def value(case: Case) -> dict[str, Tensor | float]:
    answers: dict[str, Tensor | float] = {}
    for mode, by_token in AGGREGATIONS.items():
        values = case["new_values"].clone().requires_grad_()
        loss_of = ValueLoss(case.settings["clip_value"], token_level_loss=by_token)
        loss = loss_of(values, case["values"], case["returns"], case["mask"].double())
        answers[f"value/{mode}/loss"] = loss
        answers[f"value/{mode}/gradient"] = torch.autograd.grad(loss, values)[0]
    return answers


def kl(case: Case) -> dict[str, Tensor | float]:
    """The estimates are computed in float32."""
    answers: dict[str, Tensor | float] = {
        f"kl/{estimator}": compute_approx_kl(case["logprobs"], case["ref_logprobs"], kl_estimator=estimator)
        for estimator in ("k1", "k2", "k3")
    }
    settings = case.settings
    controller = AdaptiveKLController(settings["kl_coef"], settings["target_kl"], settings["horizon"])
    coefs = []
    for observed, num_sequences in case["kl_updates"].tolist():
        controller.update(observed, num_sequences)
        coefs.append(float(controller.value))
    return answers | {"kl/adaptive_coefs": torch.tensor(coefs, dtype=torch.float64)}


if __name__ == "__main__":
    write_expected("openrlhf", oracle)
