"""Every rank enters here: command line -> settings and mesh -> verl.train.train.

python train_ppo.py                                                   one process, all roles on one device
torchrun --standalone --nproc_per_node=2 train_ppo.py --device_mesh configs/device_mesh/split_2.yaml
python train_ppo.py --help                                            every setting
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def recorded_train(config: Any, mesh: Any) -> None:
    """Trains. `record` notes this rank's exception, so that torchrun names the rank that failed first.

    A mistake that all ranks share is no rank's failure: the command line tells it, once.
    """
    from torch.distributed.elastic.multiprocessing.errors import record  # not above: --help need not wait for torch

    from verl.errors import SharedError
    from verl.train import train

    def attempt() -> SharedError | None:
        try:
            train(config, mesh)
        except SharedError as mistake:
            return mistake
        return None

    if mistake := record(attempt)():
        raise mistake


def wrong_package() -> str | None:
    """What to do if Python finds another `verl` than the one beside this file: PyPI has one of that name."""
    found = importlib.util.find_spec("verl")
    origin = Path(found.origin).resolve() if found is not None and found.origin is not None else None
    own = Path(__file__).resolve().parent / "verl" / "__init__.py"
    if origin == own:
        return None
    return (
        f"train_ppo.py needs the package {own}, and Python finds {origin}: take the other one away "
        f"(pip uninstall verl, PYTHONPATH), then run `pip install -e {own.parents[1]}`"
    )


def main() -> int:
    from verl.cli import command_line
    from verl.engine.host_memory import ask_for_huge_pages

    ask_for_huge_pages()
    return command_line.run(recorded_train, sys.argv[1:])


if __name__ == "__main__":
    if wrong := wrong_package():
        sys.stderr.write(f"{wrong}\n")
        sys.exit(2)
    from verl.processes import exit_with

    exit_with(main)
