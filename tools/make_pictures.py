"""Makes the pictures of README.md in ``docs/pictures``, from a real run: the terminal, the report, the dashboard.

    make pictures

It runs the quickstart in a terminal of its own, and a service with a task; a headless Chromium photographs the pages.
``sources.sha256`` has the digests of the files that draw what the pictures show; with ``--check``, which ``make lint``
uses, the program fails if one of them has changed since the pictures were made.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import httpx2
import pexpect
import pyte
from openai import OpenAI
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
PICTURES = Path("docs/pictures")
DIGESTS = PICTURES / "sources.sha256"
DRAWN_BY = (
    "tools/make_pictures.py",
    "examples/quickstart.yaml",
    "examples/make_word_problems.py",
    "src/alto/report",
    "src/alto/views",
    "src/alto/service/dashboard",
)
"""Files and folders that decide how the pictures look."""
COLUMNS, LINES = 122, 34
CELL_PX, LINE_PX = 8.4, 17
FRAMES, FRAME_S, LAST_S = 14, 0.6, 6.0
COLOURS = {
    "default": "#d8dade",
    "red": "#f2777a",
    "green": "#8fd19e",
    "brown": "#f0c674",
    "blue": "#81a2f0",
    "magenta": "#c9a0dc",
    "cyan": "#7fc8d8",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """How a run of characters looks in the terminal."""

    colour: str
    is_bold: bool


Line = tuple[tuple[Cell, str], ...]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of README.md anew.")
    parser.add_argument("--check", action="store_true", help="make nothing; fail if sources are newer than pictures")
    if not parser.parse_args().check:
        make()
    elif changed := changed_sources(ROOT):
        sys.exit(
            f"docs/pictures: expected pictures of the present pages, found changes of {', '.join(changed)} since they "
            "were made; run make pictures, and look at them"
        )


def make() -> None:
    """Make all pictures."""
    pictures = ROOT / PICTURES
    pictures.mkdir(exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / "examples" / "make_word_problems.py")], check=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as started:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        frames = record([sys.executable, "-m", "alto", "tune", "examples/quickstart.yaml"], folder)
        (pictures / "terminal.svg").write_text(animated(frames), encoding="utf-8")
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        (report,) = folder.glob("runs/quickstart-*/report.html")
        photograph(browser, report.as_uri(), pictures / "report.png")
        with service(folder / "service") as address:
            photograph(browser, f"{address}/tasks/{finished_task(address)}", pictures / "dashboard.png")
    write_digests(ROOT)
    print(f"wrote {', '.join(sorted(path.name for path in pictures.iterdir()))}")


# -- the sources ----------------------------------------------------------------------------------------------------


def digests(root: Path) -> dict[str, str]:
    """Return the digest of every source of the pictures, by its path in the project ``root``."""
    places = [root / place for place in DRAWN_BY]
    files = [file for place in places for file in (sorted(place.rglob("*.*")) if place.is_dir() else [place])]
    sources = [file for file in files if file.is_file() and file.suffix != ".pyc"]
    return {file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in sources}


def write_digests(root: Path) -> None:
    """Record the digests of the sources of the project ``root``, whose pictures are new."""
    lines = (f"{digest}  {name}\n" for name, digest in digests(root).items())
    (root / DIGESTS).write_text("".join(lines), encoding="utf-8")


def changed_sources(root: Path) -> list[str]:
    """Return the sources that were changed, added or removed since the pictures of the project ``root`` were made."""
    lines = (root / DIGESTS).read_text(encoding="utf-8").splitlines()
    before, now = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}, digests(root)
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


# -- the terminal ----------------------------------------------------------------------------------------------------


def record(command: Sequence[str], folder: Path) -> list[tuple[Line, ...]]:
    """Run a command in a terminal in ``folder``, and return at most ``FRAMES`` of its screens, the last one included.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    screen = pyte.Screen(COLUMNS, LINES)
    stream, seen = pyte.Stream(screen), []
    child = pexpect.spawn(
        command[0], list(command[1:]), dimensions=(LINES, COLUMNS), encoding="utf-8", timeout=None, cwd=str(folder)
    )
    while True:
        try:
            stream.feed(child.read_nonblocking(65536, timeout=0.3))
        except pexpect.TIMEOUT:
            if not child.isalive():  # a process that it left behind may hold the terminal open
                break
        except pexpect.EOF:
            break
        seen.append(lines_of(screen))
    child.close()
    if child.exitstatus:
        raise subprocess.CalledProcessError(child.exitstatus, list(command))
    different = [frame for frame, _ in groupby([*seen, lines_of(screen)])]
    chosen = (different[index * (len(different) - 1) // (FRAMES - 1)] for index in range(FRAMES))
    return [frame for frame, _ in groupby(chosen)]


def lines_of(screen: pyte.Screen) -> tuple[Line, ...]:
    """Return the screen's lines as runs of characters that look alike."""
    lines = []
    for row in range(LINES):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        runs = groupby(cells, key=lambda cell: Cell(cell.fg, cell.bold))
        lines.append(tuple((look, "".join(cell.data for cell in run)) for look, run in runs))
    return tuple(lines)


def animated(frames: Sequence[Sequence[Line]]) -> str:
    """Return an SVG picture that shows the frames one after the other, the last one longest."""
    total_s = FRAME_S * (len(frames) - 1) + LAST_S
    width, height = COLUMNS * CELL_PX + 24, LINES * LINE_PX + 24
    styles, groups = [], []
    for number, frame in enumerate(frames):
        begin = 100 * number * FRAME_S / total_s
        end = 100.0 if number == len(frames) - 1 else begin + 100 * FRAME_S / total_s
        before = f"0%,{begin - 0.01:.2f}% {{opacity:0}} " if number else ""
        after = f" {end + 0.01:.2f}%,100% {{opacity:0}}" if end < 100 else ""
        styles.append(f"@keyframes f{number} {{{before}{begin:.2f}%,{end:.2f}% {{opacity:1}}{after}}}")
        styles.append(f".f{number} {{animation:f{number} {total_s:.1f}s step-end infinite}}")
        groups.append(f'<g class="f{number}">{"".join(_texts(frame))}</g>')
    still = "g {animation:none!important; opacity:0} g:last-child {opacity:1}"
    styles.append(f"@media (prefers-reduced-motion:reduce) {{{still}}}")
    style = "text {font:14px ui-monospace,Menlo,Consolas,monospace; white-space:pre} " + " ".join(styles)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        'aria-label="alto tune in a terminal: jobs train together, and the worst ones end early">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" rx="8" fill="#16181c"/>\n'
        + "\n".join(groups)
        + "\n</svg>\n"
    )


def _texts(frame: Sequence[Line]) -> Iterator[str]:
    for row, line in enumerate(frame):
        column = 0
        for look, text in line:
            if text.strip():
                weight = ' font-weight="bold"' if look.is_bold else ""
                x, y = 12 + column * CELL_PX, 24 + row * LINE_PX
                length = f'textLength="{len(text) * CELL_PX:.1f}" lengthAdjust="spacingAndGlyphs"'
                colour = COLOURS.get(look.colour, COLOURS["default"])
                yield f'<text x="{x:.1f}" y="{y}" {length} fill="{colour}"{weight}>{html.escape(text)}</text>'
            column += len(text)


# -- the pages -------------------------------------------------------------------------------------------------------


def photograph(browser: Browser, address: str, path: Path) -> None:
    """Write a picture of the top of a page."""
    page = browser.new_page(viewport={"width": 1280, "height": 1180}, color_scheme="light")
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.screenshot(path=path)
    page.close()


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """Run ``alto serve`` in ``folder``, and yield its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "alto", "serve", "--port", str(port), "--data-dir", str(folder)]
    environment = os.environ | {"ALTO_CACHE": str(folder / "cache")}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        address = f"http://127.0.0.1:{port}"
        while True:
            try:
                if httpx2.get(f"{address}/readyz").status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.2)
        yield address
        process.terminate()


def finished_task(address: str) -> str:
    """Tune a task in the service, and return its id when it has ended.

    Raises:
        RuntimeError: The task failed.
    """
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    lines = (ROOT / "examples" / "data" / "word_problems" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = ({"user": row["question"], "assistant": row["answer"]} for row in map(json.loads, lines))
    talks = ([{"role": role, "content": text} for role, text in row.items()] for row in rows)
    content = "".join(json.dumps({"messages": messages}) + "\n" for messages in talks)
    file = client.files.create(file=("train.jsonl", content.encode()), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="alto-tiny",
        training_file=file.id,
        suffix="word-problems",
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"learning_rate": [1e-3, 5e-3, 2e-2], "r": [4, 16], "n_epochs": 2}},  # type: ignore[dict-item]
        },
    )
    while (job := client.fine_tuning.jobs.retrieve(job.id)).status not in ("succeeded", "failed", "cancelled"):
        time.sleep(1)
    if job.status != "succeeded":
        raise RuntimeError(f"expected the task to succeed, found {job.status}: {job.error}")
    return job.id


if __name__ == "__main__":
    main()
