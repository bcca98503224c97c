"""`penstock import-gguf`: turn a GGUF file into a checkpoint folder that can be served."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path

from engine.memory.plan import in_units
from penstock.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="the GGUF file: llama, qwen2 or qwen3, in Q4_K_M, Q8_0, F16 ...")
    add("folder", metavar="FOLDER", type=Path, help="the checkpoint folder to make")
    add("--tokenizer", metavar="DIR", type=Path, help="the folder of tokenizer.json; default: the file's own")
    add(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of the weights in the folder; default: %(default)s",
    )


def run(arguments: Namespace) -> int:
    """Makes the folder. Raises CheckpointError for a file that cannot be imported."""
    if find_spec("gguf") is None:
        raise ConfigError("the gguf package is not installed; run: pip install 'penstock[serve,gguf]'")
    from engine.models.gguf.write_folder import import_gguf

    made = import_gguf(arguments.file, arguments.folder, arguments.tokenizer, arguments.dtype)
    print(f"{arguments.folder}: {made.architecture}, {made.num_tensors} tensors, {in_units(made.num_bytes)}")
    print(f"Serve it: penstock serve --model {arguments.folder}")
    return 0
