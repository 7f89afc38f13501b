"""All that can be said of a mesh before it runs: what is wrong, what may not be meant, and what each device holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl.advise.budget import Budget, budgets
from verl.advise.degrees import spanning, torn_copies, unsuitable
from verl.advise.fit import small_cache, tight, too_large, unsized_cache
from verl.advise.job import Job
from verl.advise.model import ModelShape
from verl.checks import problems as setting_problems
from verl.config import PPOConfig

_NOT_NEEDED = ("model.path:", "data.train_files:")
"""Settings that a run needs and a mesh does not."""


@dataclass(frozen=True)
class Report:
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    budgets: tuple[Budget, ...]


def examine(
    job: Job, models: Mapping[str, ModelShape], config: PPOConfig, device_memory: int | None, settings: bool
) -> Report:
    """Holds a mesh against models and hardware.

    Args:
        job: the mesh with its ranks.
        models: by role; what depends on a model is left out for a role that is missing.
        config: batch sizes and token budgets.
        device_memory: bytes of a device; None: memory is reckoned and not judged.
        settings: whether `config` is what the user means to run with, and not just the defaults.
    """
    problems = [*spanning(job), *unsuitable(job, models)]
    unsplit = bool(problems)
    if settings:
        dp = {role: placement.dp for role, placement in job.placements.items() if role in job.mesh.roles}
        problems += [text for text in setting_problems(config, dp) if not text.startswith(_NOT_NEEDED)]
    if unsplit:  # what cannot be split has no shares to add up
        return Report(tuple(problems), (*_idle(job), *torn_copies(job)), ())
    found = budgets(job, models, config, device_memory)
    unsized = list(unsized_cache(job, found, device_memory))
    warnings = [*_idle(job), *torn_copies(job)]
    if device_memory is None:
        warnings += unsized  # on a CPU it is no problem
    else:
        problems += [*unsized, *small_cache(job, found, models, config)]
        sized = [budget for budget in found if not (unsized and budget.shares and budget.worker == "rollout")]
        problems += too_large(job, sized, device_memory)
        warnings += tight(job, sized, device_memory)
    return Report(tuple(problems), tuple(warnings), tuple(found))


def _idle(job: Job) -> Iterator[str]:
    if job.idle:
        count = len(job.idle)
        yield (
            f"{job.mesh.source}: no role uses {job.devices(job.idle)}; the "
            f"{'process' if count == 1 else f'{count} processes'} there would only wait: add the "
            f"device{'' if count == 1 else 's'} to a role, or start fewer processes"
        )
