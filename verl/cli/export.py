"""`verl export`: a role of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from verl.errors import UserError
from verl.mesh.roles import DTYPES


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="a checkpoint's model as a Hugging Face folder",
        description="Writes the model of a checkpoint as a Hugging Face folder, for transformers and vLLM. It needs no "
        "GPU, and memory for one weight file.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="such as RUN_DIR/checkpoints/step_100")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument("--role", default="actor", help="whose model: actor (the default) or critic")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default: bfloat16)")
    parser.add_argument("--replace", action="store_true", help="an older OUT goes once the new one is whole")


def run(arguments: argparse.Namespace) -> int:
    checkpoint, out = arguments.checkpoint, arguments.out
    if out.resolve().is_relative_to(checkpoint.resolve()):
        raise UserError(f"verl export: {out} lies in the checkpoint; name a folder outside it")
    from verl.engine.export import export_checkpoint  # not above: --help need not wait for torch
    from verl.engine.manifest import step_folders
    from verl.roles.role import torch_dtype

    for parent in (checkpoint, checkpoint / "checkpoints"):
        if found := step_folders(parent):
            count = "a checkpoint" if len(found) == 1 else f"{len(found)} checkpoints"
            raise UserError(
                f"verl export: {checkpoint} holds {count} of a run; name one itself, such as {found[max(found)]}"
            )
    try:
        export_checkpoint(checkpoint, arguments.role, out, torch_dtype(arguments.dtype), replace=arguments.replace)
    except OSError as error:  # no room, no permission, no such parent
        raise UserError(f"verl export: {error.filename or out}: {error.strerror}") from error
    print(f"{out}: {arguments.role} of {checkpoint} in {arguments.dtype}")
    return 0
