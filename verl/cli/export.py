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
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: bfloat16; of an adapter float32)")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, as a folder for peft")
    parser.add_argument(
        "--base", metavar="FOLDER", type=Path, help="the model that the adapter was trained on, if moved"
    )
    parser.add_argument("--replace", action="store_true", help="an older OUT goes once the new one is whole")


def run(arguments: argparse.Namespace) -> int:
    checkpoint, out = arguments.checkpoint, arguments.out
    if out.resolve().is_relative_to(checkpoint.resolve()):
        raise UserError(f"verl export: {out} lies in the checkpoint; name a folder outside it")
    from verl.engine.export import export_adapters, export_checkpoint  # not above: --help need not wait for torch
    from verl.engine.manifest import step_folders
    from verl.roles.role import torch_dtype

    for parent in (checkpoint, checkpoint / "checkpoints"):
        if found := step_folders(parent):
            count = "a checkpoint" if len(found) == 1 else f"{len(found)} checkpoints"
            raise UserError(
                f"verl export: {checkpoint} holds {count} of a run; name one itself, such as {found[max(found)]}"
            )
    dtype = arguments.dtype or ("float32" if arguments.adapter else "bfloat16")
    role, replace, base = arguments.role, arguments.replace, arguments.base
    try:
        if arguments.adapter:
            export_adapters(checkpoint, role, out, torch_dtype(dtype), replace)
        else:
            export_checkpoint(checkpoint, role, out, torch_dtype(dtype), replace=replace, base=base)
    except OSError as error:  # no room, no permission, no such parent
        raise UserError(f"verl export: {error.filename or out}: {error.strerror}") from error
    what = f"{role}'s adapter" if arguments.adapter else role
    print(f"{out}: {what} of {checkpoint} in {dtype}")
    return 0
