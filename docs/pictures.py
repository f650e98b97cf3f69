"""Makes docs/report.png and docs/dashboard.png: a sick run's page, and the list of some runs, in a real browser.

python docs/pictures.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).parent
FAULTS = {"jump": ("lr-jump", "transformer"), "frozen": ("layer-frozen", None), "overflow": ("fp16-overflow", None)}
_HOLTER = [sys.executable, "-m", "holter"]


def train(runs: Path) -> None:
    subprocess.run([*_HOLTER, "demo", "--steps", "150", "--run", str(runs / "gpt-base")], check=True)
    for name, (fault, model) in FAULTS.items():
        on = ["--on", model] if model else []
        subprocess.run([*_HOLTER, "demo", "--fault", fault, *on, "--run", str(runs / name)], check=True)


def picture_of_report(browser: Browser, runs: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 1840})
    target = runs.parent / "report.html"
    subprocess.run([*_HOLTER, "report", str(runs / "jump"), "-o", str(target)], check=True)
    page.goto(target.as_uri())
    page.locator(".js-plotly-plot").first.wait_for()
    page.wait_for_timeout(1500)
    page.screenshot(path=HERE / "report.png")


def picture_of_dashboard(browser: Browser, runs: Path) -> None:
    command = [*_HOLTER, "serve", runs.name, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=runs.parent) as server:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        page = browser.new_page(viewport={"width": 1280, "height": 640}, color_scheme="dark")
        page.goto(address)
        page.get_by_text("Healthy").first.wait_for(timeout=120_000)
        page.wait_for_timeout(15_000)  # until all are examined
        page.screenshot(path=HERE / "dashboard.png")
        server.terminate()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        runs = Path(directory) / "runs"
        runs.mkdir()
        train(runs)
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        picture_of_report(browser, runs)
        picture_of_dashboard(browser, runs)
        browser.close()


if __name__ == "__main__":
    main()
