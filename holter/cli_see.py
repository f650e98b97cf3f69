"""The commands that show a run: report, serve, top, compare."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holter.terminal import FOUND, UNREADABLE, about, console, print_json, unreadable
from holter.words import printable, size

if TYPE_CHECKING:
    from holter.comparison.comparing import Comparison


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="[default: RUN/report.html]")
@click.option("--png", is_flag=True, help="Also the main charts as PNG files, in a directory beside FILE.")
def report(run: Path, output: Path | None, png: bool) -> None:
    """Write RUN as one HTML page that opens offline: verdict, findings, layers over steps, machine, health."""
    from holter.report.document import report as page_of
    from holter.report.document import view_of
    from holter.run import find_run

    directory = find_run(run)
    target = output or directory / "report.html"
    view = view_of(directory)
    try:
        _write_page(target, page_of(view))
        written = [target, *(_pictures(view, target.with_name(f"{target.stem}-charts")) if png else ())]
    except OSError as error:
        raise ValueError(f"cannot write {about(error)}. Name a file you may write with -o") from error
    click.echo(printable(view["verdict"]["sentence"]))
    for path in written:
        click.echo(f"{printable(str(path))}  {size(path.stat().st_size)}")
    if view["run"]["state"] == "unreadable":
        raise SystemExit(UNREADABLE)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), default="runs")
@click.option("--host", default="127.0.0.1", show_default=True, help="Any other than this machine needs a token.")
@click.option("--port", type=click.IntRange(0, 65535), help="0 for any that is free.  [default: 4658]")
@click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE", help="Holds a token of yours, for you only."
)
@click.option("--token", default="", help="Others see it in the list of processes: use --token-file or HOLTER_TOKEN.")
@click.option("--allow", multiple=True, metavar="NAME:PORT", help="Another name it is reached by, as through a proxy.")
@click.option("--open", "open_browser", is_flag=True, help="Open a browser.")
def serve(
    directory: Path,
    host: str,
    port: int | None,
    token_file: Path | None,
    token: str,
    allow: tuple[str, ...],
    open_browser: bool,
) -> None:
    """Show all runs in DIRECTORY, by default runs, in a browser, as they train; or the one run that it is.

    Whoever has the token may look. It is made up and stands in the address that is printed; one of your own is that of
    --token-file, or of HOLTER_TOKEN.
    """
    from holter.dashboard.serve import PORT, Address
    from holter.dashboard.serve import serve as serve_runs
    from holter.dashboard.token import token_in

    if token and token_file is not None:
        raise click.UsageError("name --token-file or --token, not both")
    found = token or (token_in(token_file) if token_file is not None else os.environ.get("HOLTER_TOKEN", ""))
    address = Address(host, PORT if port is None else port, found, allow)
    serve_runs(by_name(directory), address, echo=click.echo, open_browser=open_browser)


def by_name(directory: Path) -> Path:
    """A directory, or the run of that name under runs/, as `holter runs` lists it."""
    from holter.run import is_run

    named = Path("runs") / directory
    return named if len(directory.parts) == 1 and not directory.exists() and is_run(named) else directory


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="One look, and out.")
def top(run: Path, once: bool) -> None:
    """Follow RUN in the terminal: progress, loss, the worst layers, findings. q ends it."""
    from holter.top import show_top

    if show_top(run, console(), once=once) == "unreadable":
        raise SystemExit(UNREADABLE)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--by", type=click.Choice(["step", "samples", "tokens"]), default="step", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also as a page that opens offline.")
@click.option("--fail-on", type=click.Choice(["regression"]), help=f"Exit with code {FOUND} where a run is worse.")
def compare(runs: tuple[Path, ...], by: str, as_json: bool, html: Path | None, fail_on: str | None) -> None:
    """Compare runs with the first: where they part, what differs, which findings went and came, did it help.

    A regression is a finding of a warning or worse that came or became more severe (of performance only where steps
    take, or memory is, half as much again), a last loss that is worse by more than chance (three times its error, 2 %
    of it and 1 % of what it fell by), or a training that failed or crashed where the first did not.
    """
    from holter.comparison.comparing import compare as compare_runs
    from holter.comparison.view import comparison_json

    if len(runs) < 2:
        raise click.UsageError("name two runs or more: the first is what the others are compared with")
    found = compare_runs(*runs, by=by)  # type: ignore[arg-type]
    if lost := next((side for side in found.sides if side.state == "unreadable"), None):
        raise ValueError(unreadable(lost.path, "Nothing in its journals can be read."))
    if html is not None:
        _write_comparison(found, html)
    if as_json:
        print_json(comparison_json(found))
    else:
        from holter.comparison.render import render_comparison

        console().print(render_comparison(found))
    if fail_on is not None and found.regressed:
        raise SystemExit(FOUND)


def _write_page(target: Path, text: str) -> None:
    """Write it whole or not at all: where the disk is full, an older page stays, and none is left empty."""
    target = Path(os.path.realpath(target))  # of a link, what it leads to
    if not target.parent.is_dir():  # told by its own name, not by the draft's
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(target.parent))
    if target.exists() and not target.is_file():  # a pipe, or a terminal
        target.write_text(text, "utf-8")
        return
    draft = target.with_name(f".page-{secrets.token_hex(8)}")
    try:
        draft.write_text(text, "utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _write_comparison(found: Comparison, target: Path) -> None:
    from holter.comparison.document import comparison_page
    from holter.comparison.view import comparison_view

    try:
        _write_page(target, comparison_page(comparison_view(found)))
    except OSError as error:
        raise ValueError(f"cannot write {about(error)}. Name a file you may write with --html") from error


def _pictures(view: dict[str, Any], directory: Path) -> list[Path]:
    from holter.report.png import write_pngs

    directory.mkdir(exist_ok=True)
    try:
        return write_pngs(view, directory)
    except ImportError as error:
        raise ValueError(str(error)) from error
