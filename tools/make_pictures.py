"""Makes the pictures of README.md in ``docs/pictures``, from a real run: the terminal, the report, the dashboard.

    make pictures

It runs the quickstart in a terminal of its own, and a service with a task; a headless Chromium photographs the pages.
"""

from __future__ import annotations

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
PICTURES = ROOT / "docs" / "pictures"
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
    PICTURES.mkdir(exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / "examples" / "make_word_problems.py")], check=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as started:
        folder = Path(name)
        frames = record([sys.executable, "-m", "alto", "tune", "examples/quickstart.yaml", "--output-dir", name])
        (PICTURES / "terminal.svg").write_text(animated(frames), encoding="utf-8")
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        (report,) = folder.glob("quickstart-*/report.html")
        photograph(browser, report.as_uri(), PICTURES / "report.png")
        with service(folder / "service") as address:
            photograph(browser, f"{address}/tasks/{finished_task(address)}", PICTURES / "dashboard.png")
    print(f"wrote {', '.join(sorted(path.name for path in PICTURES.iterdir()))}")


# -- the terminal ----------------------------------------------------------------------------------------------------


def record(command: Sequence[str]) -> list[tuple[Line, ...]]:
    """Run a command in a terminal, and return at most ``FRAMES`` of its screens, the last one included.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    screen = pyte.Screen(COLUMNS, LINES)
    stream, seen = pyte.Stream(screen), []
    child = pexpect.spawn(
        command[0], list(command[1:]), dimensions=(LINES, COLUMNS), encoding="utf-8", timeout=None, cwd=str(ROOT)
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
