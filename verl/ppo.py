"""The whole algorithm, readable top to bottom: what a step is, and the loop around it."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import PPOConfig
from verl.data.prompts import PromptBatch
from verl.flow.batch import Experience
from verl.flow.exchange import Exchange
from verl.monitor.metrics import Metrics
from verl.roles.build import Roles
from verl.run import Run


def ppo_step(prompts: PromptBatch, roles: Roles, hand_over: Exchange, config: PPOConfig) -> tuple[Metrics, Experience]:
    """One PPO step. Every rank runs it; a role's method computes on its ranks and returns a column elsewhere."""
    actor, critic, reference = roles.actor, roles.critic, roles.reference
    reward, rollout, judge = roles.reward, roles.rollout, roles.judge

    responses = rollout.generate(prompts, config.rollout, config.rollout.n, key="train", on_sample=reward.submit)
    responses = hand_over(responses, to=(actor, critic, reference, reward))

    recomputes = config.algorithm.recompute_old_logprobs
    experience = Experience(
        responses,
        old_logprobs=actor.logprobs(responses) if recomputes else responses.rollout_logprobs,
        ref_logprobs=reference.logprobs(responses) if reference else None,
        values=critic.values(responses) if critic else None,
        scores=reward.scores(prompts, responses),
    )
    experience = hand_over(experience, to=(judge,))
    experience, metrics = judge.with_advantages(experience)
    experience = hand_over(experience, to=(actor, critic))

    if critic:
        metrics |= critic.update(experience)
    if prompts.step >= config.trainer.critic_warmup:
        metrics |= actor.update(experience)
    rollout.load(actor)  # 3D-HybridEngine; also what holds the rollout back
    return metrics, experience


def validate(batches: Iterator[PromptBatch], roles: Roles, hand_over: Exchange, config: PPOConfig) -> Metrics:
    """Scores of greedy and of sampled responses to every validation prompt: the same prompts and seeds each time."""
    metrics = Metrics()
    sampling = config.rollout.val
    greedy = type(sampling)(temperature=0.0, n=1)
    for batch in batches:
        for name, how in (("val/score", greedy), ("val/sampled_score", sampling)):
            if how.n:
                responses = roles.rollout.generate(batch, how, how.n, key=name)
                responses = hand_over(responses, to=(roles.reward,))
                metrics |= roles.reward.grade(batch, responses, name)
    return metrics


def fit(run: Run, roles: Roles) -> None:
    """Steps from where the run stands to its end, with validation and checkpoints between them."""
    config, hand_over = run.config, run.job.hand_over
    roles.rollout.load(roles.actor)
    if run.validates and config.trainer.val_before_train and run.first_step == 0:
        run.settle_validation(0, validate(run.validation_batches(), roles, hand_over, config))

    for step in range(run.first_step, run.total_steps):
        run.begin_step()
        prompts = run.loader.next_batch(step)
        metrics, experience = ppo_step(prompts, roles, hand_over, config)
        run.settle(step + 1, prompts, metrics, experience)
        if run.validates and run.due(step + 1, config.trainer.test_freq):
            run.settle_validation(step + 1, validate(run.validation_batches(), roles, hand_over, config))
        if config.trainer.save_freq >= 0 and run.due(step + 1, config.trainer.save_freq):
            run.save(step + 1)
