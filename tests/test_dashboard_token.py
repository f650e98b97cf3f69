"""The token stays between those who know it: not in the list of processes, not in a file that others may read."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

import psutil
import pytest
from click.testing import CliRunner

from holter.cli import main
from holter.dashboard import serve as serve_file
from holter.dashboard.serve import Address
from holter.dashboard.token import private_page, token_in
from tests.browser import chromium
from tests.dashboards import served, wait_for, write_run

TOKEN = "correct-horse-battery-staple"


def written(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_a_file_for_its_owner_alone_holds_the_token(tmp_path: Path) -> None:
    """P21"""
    assert token_in(written(tmp_path / "token", f"{TOKEN}\n")) == TOKEN


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such permissions")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o777])
def test_a_token_that_others_may_read_is_refused_with_the_way_out(tmp_path: Path, mode: int) -> None:
    """P21"""
    with pytest.raises(ValueError, match="chmod 600"):
        token_in(written(tmp_path / "token", TOKEN, mode))


@pytest.mark.parametrize("text", ["", " \n", b"\xff\xfe"])
def test_a_file_without_a_token_is_told(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(ValueError, match="no token in"):
        token_in(written(tmp_path / "token", text))
    with pytest.raises(ValueError, match="cannot read"):
        token_in(tmp_path / "none")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Address]]:
    """How the dashboard would have been started."""
    found: list[tuple[Path, Address]] = []
    monkeypatch.setattr(serve_file, "serve", lambda directory, address, **_: found.append((directory, address)))
    monkeypatch.delenv("HOLTER_TOKEN", raising=False)
    return found


def test_the_token_is_that_of_the_option_the_file_or_the_environment(
    tmp_path: Path, asked: list[tuple[Path, Address]]
) -> None:
    file = str(written(tmp_path / "token", "of-the-file-of-the-file"))
    environment = {"HOLTER_TOKEN": "of-the-environment"}
    for words in (["--token-file", file], ["--token", "of-the-command-line"], []):
        done = CliRunner().invoke(main, ["serve", str(tmp_path), *words], env=environment)
        assert done.exit_code == 0, done.output
    expected = ["of-the-file-of-the-file", "of-the-command-line", "of-the-environment"]
    assert [address.token for _, address in asked] == expected
    both = CliRunner().invoke(main, ["serve", str(tmp_path), "--token", "x" * 20, "--token-file", file])
    assert both.exit_code == 2 and "not both" in both.output
    others = CliRunner().invoke(main, ["serve", "--host", "0.0.0.0", "--token-file", str(tmp_path / "none")])
    assert others.exit_code == 1 and others.output.count("\n") == 1


def test_a_run_is_served_and_listed_by_its_path_and_by_its_name(
    tmp_path: Path, asked: list[tuple[Path, Address]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "heron", steps=7)
    for name in ("heron", "runs/heron"):
        assert CliRunner().invoke(main, ["serve", name]).exit_code == 0
        listed = CliRunner().invoke(main, ["runs", name])
        assert listed.exit_code == 0 and "heron" in listed.output and "finished" in listed.output
    assert [directory for directory, _ in asked] == [Path("runs/heron")] * 2
    monkeypatch.chdir(tmp_path / "runs" / "heron")
    assert "heron" in CliRunner().invoke(main, ["runs", "."]).output
    missing = CliRunner().invoke(main, ["runs", "none"])
    assert missing.exit_code == 1 and "is not a directory" in missing.output


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such permissions")
def test_the_page_for_the_browser_is_private_and_does_not_stay() -> None:
    """P21"""
    with private_page("http://127.0.0.1:1/?token=a&b=<\"'>") as url:
        page = Path(unquote(urlparse(url).path))
        assert stat.S_IMODE(page.stat().st_mode) == 0o600 and stat.S_IMODE(page.parent.stat().st_mode) == 0o700
        assert "url=http://127.0.0.1:1/?token=a&amp;b=&lt;&quot;&#x27;&gt;" in page.read_text()
        assert "token" not in url
    assert not page.parent.exists()


@pytest.mark.skipif(os.name != "posix", reason="the browser is a shell script")
def test_a_browser_is_opened_without_the_token_in_its_command_line(tmp_path: Path) -> None:
    """P21: a real browser then comes to the list; when the server ends, the page is gone."""
    write_run(tmp_path / "runs" / "run", steps=3)
    said = tmp_path / "said"
    script = written(tmp_path / "browser", f'#!/bin/sh\necho "$@" > {said}.draft; mv {said}.draft {said}\n', 0o700)
    before = (
        "import holter.dashboard.serve as file; plain = serve\n"
        "def serve(*words, **options): plain(*words, **options, open_browser=True)\n"
    )
    with served(tmp_path / "runs", before, BROWSER=f"{script} %s", TMPDIR=str(tmp_path)) as server:
        url = wait_for(lambda: said.exists() and said.read_text().strip())
        page_path = Path(unquote(urlparse(url).path))
        assert url.startswith("file://") and server.token not in url and server.token in page_path.read_text()
        with chromium() as browser:
            page = browser.new_page()
            page.goto(url)
            page.wait_for_selector(".run")
            assert page.url == f"{server.address}/"
    assert not page_path.parent.exists()


def test_the_worker_does_not_know_the_token(tmp_path: Path) -> None:
    """P21, P24: it reads runs that anyone may have written."""
    write_run(tmp_path / "run", steps=3)
    with served(tmp_path, HOLTER_TOKEN=TOKEN) as server:
        wait_for(lambda: server.get("/api/runs")["runs"][0]["verdict"])
        (worker,) = psutil.Process(server.process.pid).children()
        assert sys.executable in worker.cmdline()[0]
        assert "HOLTER_TOKEN" not in worker.environ() and "PATH" in worker.environ()
        assert TOKEN not in " ".join(worker.cmdline())
