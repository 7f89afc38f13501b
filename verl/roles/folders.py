"""The folders that a run reads models from: where they are on this node, and whether they hold what the roles need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from verl.config import PPOConfig
from verl.errors import ConfigError, UserError
from verl.flow.board import Board
from verl.flow.job import Job
from verl.flow.placement import Placement
from verl.model.folder import local_folder
from verl.model.heads import Head
from verl.model.load import check_adapters, check_folder, positions, read_config


@dataclass(frozen=True)
class Folders:
    """On this node. A role that names no model of its own has the actor's."""

    actor: Path
    critic: Path
    reference: Path
    reward: Path | None
    tokenizer: Path

    def by_role(self) -> dict[str, Path | None]:
        """Each role's model; the rollout has the actor's. None: the role has no model."""
        return {
            "actor": self.actor,
            "critic": self.critic,
            "reference": self.reference,
            "reward": self.reward,
            "rollout": self.actor,
        }


def find_folders(config: PPOConfig, job: Job) -> Folders:
    """Resolves every model path, one download a node: its first rank fetches, the others find it in the cache."""

    def fetch() -> None:
        with _signs_of_life(job.board):
            _find(config, fetch=True)

    job.together(fetch if job.local_rank == 0 else lambda: None)
    return job.together(lambda: _find(config, fetch=False))


@contextmanager
def _signs_of_life(board: Board) -> Iterator[None]:
    """While a hub is asked, which gives up by itself when nothing comes any more."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(1.0):
            board.beat()

    thread = threading.Thread(target=beat, name="verl-fetching", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _find(config: PPOConfig, fetch: bool) -> Folders:
    """Raises UserError for all paths that lead nowhere."""
    problems: list[str] = []

    def folder(path: str, setting: str, of_model: bool = True) -> Path:
        try:
            return local_folder(path, setting, fetch, of_model)
        except UserError as error:
            problems.extend(error.problems)
            return Path()

    actor = folder(config.model.path, "model.path")
    critic = config.critic.path if config.needs_critic else None
    reference = config.reference.path if config.needs_reference else None
    reward, tokenizer = config.reward.model.path, config.model.tokenizer_path
    folders = Folders(
        actor=actor,
        critic=folder(critic, "critic.path") if critic else actor,
        reference=folder(reference, "reference.path") if reference else actor,
        reward=folder(reward, "reward.model.path") if reward else None,
        tokenizer=folder(tokenizer, "model.tokenizer_path", of_model=False) if tokenizer else actor,
    )
    if problems:
        raise UserError(*problems)
    return folders


def check_models(config: PPOConfig, placements: dict[str, Placement], folders: Folders, job: Job) -> None:
    """Before any weight is read: every rank looks at the folders of the roles that it serves.

    Raises UserError for all folders that a role cannot be loaded from, and for sequences that the model does not take.
    """
    needed = {
        "actor": (config.model.path, "model.path", folders.actor, Head.lm),
        "critic": (config.critic.path, "critic.path", folders.critic, Head.token_value),
        "reference": (config.reference.path, "reference.path", folders.reference, Head.lm),
        "reward": (config.reward.model.path, "reward.model.path", folders.reward, Head.score),
    }

    def check() -> None:
        problems: list[str] = []
        for role, (path, setting, folder, head) in needed.items():
            if folder is not None and role in placements and job.rank in placements[role].ranks:
                try:
                    kernel, trust = config.model.attn_implementation, config.model.trust_remote_code
                    check_folder(folder, head, job.device, kernel, trust)
                    if role == "actor":
                        _check_lengths(config, folder)
                except UserError as error:
                    problems += [f"{setting if path else 'model.path'}: {problem}" for problem in error.problems]
                else:
                    problems += _adapter_problems(config, role, folder, head)
        if problems:
            raise UserError(*dict.fromkeys(problems))

    job.together(check)


def _adapter_problems(config: PPOConfig, role: str, folder: Path, head: Head) -> list[str]:
    lora = {"actor": config.actor.lora, "critic": config.critic.lora}.get(role)
    if lora is None or not lora.rank:
        return []
    try:
        check_adapters(folder, head, lora, config.model.trust_remote_code)
    except UserError as error:
        return [f"{role}.{problem}" for problem in error.problems]
    return []


def _check_lengths(config: PPOConfig, folder: Path) -> None:
    """Raises ConfigError where the longest sequence of the settings is longer than the model's."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    limit = positions(read_config(folder, config.model.trust_remote_code))
    if limit is not None and prompt + response > limit:
        raise ConfigError(
            f"{folder} takes sequences of {limit} tokens (max_position_embeddings), and "
            f"data.max_prompt_length={prompt} + data.max_response_length={response} is {prompt + response}; lower one"
        )


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"no tokenizer can be loaded from {folder}: {str(error).rstrip('.')}. Set model.tokenizer_path to a folder "
            "that has one."
        ) from error


def stop_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase, further: list[int]) -> tuple[int, ...]:
    """Every id that ends a response: the model's, the tokenizer's and the user's."""
    ids = set(further)
    if (folder / "generation_config.json").is_file():
        try:
            configured = GenerationConfig.from_pretrained(folder).eos_token_id
        except (OSError, ValueError) as error:
            raise UserError(f"model.path: the generation config cannot be read: {error}") from error
        ids |= set(configured if isinstance(configured, list) else [configured] if configured is not None else [])
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))
