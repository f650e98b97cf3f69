"""The command line. What a command needs loads when it runs."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from errno import EACCES
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holter.cli_clinic import clinic
from holter.cli_see import by_name, compare, report, serve, top
from holter.terminal import FOUND, UNREADABLE, about, console, print_json, readable
from holter.words import printable, size

if TYPE_CHECKING:
    from holter.run import Run


_FILES, _TOOLS = ("parquet", "csv"), ("tensorboard", "wandb", "mlflow", "trackio")
_TAKEN_BY = {"-o": (*_FILES, "tensorboard"), "--layers": _TOOLS, "--steps": _TOOLS, "--project": _TOOLS[1:]}
_SEVERITIES = ["info", "warning", "critical"]  # as in diagnosis.finding, which needs numpy


class _Commands(click.Group):
    """What a user can put right is one line on stderr and exit code 1, never a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError:  # `holter show RUN | head` is no error; click ends quietly
            raise
        except OSError as error:
            raise click.ClickException(printable(about(error))) from error
        except ValueError as error:
            raise click.ClickException(printable(str(error))) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="holter", prog_name="holter", message="%(prog)s %(version)s")
def main() -> None:
    """Holter: what your training recorded, step by step and layer by layer."""
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that has no sign for a character gets a question mark
        sys.stdout.reconfigure(errors="replace")


def _known_fault(context: click.Context, parameter: click.Parameter, fault: str | None) -> str | None:
    from holter.clinic.case import CAUSES

    if fault == "list" and not context.resilient_parsing:
        click.echo("\n".join(CAUSES))
        context.exit()
    if fault is not None and fault not in CAUSES:
        raise click.BadParameter(f"{fault!r} is none of: {', '.join(CAUSES)}")
    return fault


@main.command()
@click.option("--steps", type=click.IntRange(min=1), help="Steps to train.  [default: 200]")
@click.option("--run", type=click.Path(path_type=Path), help="Where to record.  [default: runs/<date-time-word>]")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Of weights and batches.  [default: 0]")
@click.option("--fault", callback=_known_fault, metavar="CAUSE", help="What goes wrong: `--fault list` names all.")
@click.option("--on", metavar="MODEL", help="Of a fault: mlp, transformer, ...; not each is shown on all.")
def demo(steps: int | None, run: Path | None, seed: int | None, fault: str | None, on: str | None) -> None:
    """Train a small GPT on the standard library's source, under a monitor.

    Takes about half a minute on two cores and downloads nothing.

    With --fault a smaller training gets sick: it is diagnosed while it runs, run again as advised (its run is called
    RUN-fixed), and the two are compared.
    """
    # Threads that wait for each other by spinning make a step ten times slower as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if fault is not None:
        if steps is not None or seed is not None:
            raise click.UsageError("--steps and --seed are fixed where there is a --fault")
        _demo_fault(fault, on, run)
    elif on is not None:
        raise click.UsageError("--on needs a --fault")
    else:
        _demo(steps or 200, run, seed or 0)


def _demo(steps: int, run: Path | None, seed: int) -> None:
    directory = _new_run(run)
    screen = console()
    with screen.status("Loading torch") if screen.is_terminal else nullcontext():
        from holter.demo import DemoSettings, shown_on, train

    interrupted = False
    try:
        with shown_on(screen, steps) as on_step:
            train(DemoSettings(steps=steps, seed=seed), run=directory, on_step=on_step)
    except KeyboardInterrupt:
        interrupted = True  # what was recorded until then is there all the same
    from holter.run import open_run
    from holter.show import render_demo
    from holter.summary import summarise

    screen.print(render_demo(summarise(open_run(directory))))
    if interrupted:
        raise click.Abort


def _demo_fault(fault: str, on: str | None, run: Path | None) -> None:
    screen = console()
    with screen.status("Loading torch") if screen.is_terminal else nullcontext():
        from holter.demo_fault import choose, show_fault

    try:
        sick, twin = choose(fault, on)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--on") from error
    directory = _new_run(run)
    fixed = _new_run(directory.with_name(f"{directory.name}-fixed"))
    from holter.run import is_run

    for one in (directory, fixed):
        if is_run(one):  # a second training in it could not be told from the first
            raise ValueError(f"{one} holds a run already: name another place with --run")
    show_fault(screen, sick, twin, directory, fixed)


def _new_run(named: Path | None) -> Path:
    from holter.run import create_directory

    try:
        directory = create_directory(named)
        if not os.access(directory, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES), str(directory))
    except OSError as error:
        raise ValueError(f"cannot record to {about(error)}. Name a directory you may write with --run") from error
    return directory


@main.command()
@click.argument("directory", type=click.Path(path_type=Path), default="runs")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def runs(directory: Path, as_json: bool) -> None:
    """List the runs in DIRECTORY, by default runs; or the one run that it is.

    Damaged journals are told, of the newest runs up to 512 MiB. Exit code 1 if DIRECTORY is one run and nothing in it
    can be read.
    """
    from holter.glance import check_for_damage, glance, glance_at_runs
    from holter.run import Run, is_run

    directory = by_name(directory)
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory: name one that holds runs, or make a first with `holter demo`"
        )
    is_one = is_run(directory)
    glances, left_out = check_for_damage([glance(Run(directory.resolve()))] if is_one else glance_at_runs(directory))
    if as_json:
        print_json(glances)
    elif not glances:
        click.echo(
            f"No runs in {printable(str(directory))} yet: holter.watch() records one, and so does `holter demo`."
        )
    else:
        from holter.show import render_runs

        console().print(render_runs(glances, time.time()))
        if left_out:
            click.echo(f"{left_out:,} of them not checked for damage, for their size: `holter show RUN` does that.")
    if is_one and glances[0].state == "unreadable":
        raise SystemExit(UNREADABLE)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--all", "all_layers", is_flag=True, help="Every layer, not only the worst.")
@click.option("--role", help="Only this role, such as gradient or weight.")
@click.option("--json", "as_json", is_flag=True, help="For scripts: every layer, unrounded.")
def show(run: Path, all_layers: bool, role: str | None, as_json: bool) -> None:
    """Show what is odd about RUN, how it went, and the layers of each role, the worst first.

    "vs siblings" is a layer's norm (of updates the ratio to the weight) over the median of its kind: matrices, biases
    or vectors. "change" and "growth" are its last over its first, "median" is over the run, and everything else is as
    last measured; "unchanged" is of all its weights, those without a gradient too. Activations are listed in the order
    in which they run.
    """
    from holter.run import open_run
    from holter.summary import summarise

    summary = summarise(readable(open_run(run)))
    roles = [found.role for found in summary.roles]
    if role is not None:
        if role not in roles:
            raise ValueError(f"{run} has no role {role!r}: there {_are(roles)}")
        summary = replace(summary, roles=tuple(found for found in summary.roles if found.role == role))
    if as_json:
        print_json(summary)
    else:
        from holter.show import render_run

        console().print(render_run(summary, all_layers=all_layers))


def _are(roles: list[str]) -> str:
    return f"are {', '.join(roles)}" if roles else "is none yet"


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.option(
    "--fail-on", type=click.Choice(_SEVERITIES), help=f"Exit with code {FOUND} on a finding this severe, or more."
)
def diagnose(run: Path, as_json: bool, fail_on: str | None) -> None:
    """Say what is wrong with RUN: the cause, where, since when, and what to change."""
    from holter.diagnosis.convergence import outlook
    from holter.diagnosis.health import check_health
    from holter.run import open_run

    opened = readable(open_run(run))
    history = opened.history.latest()
    findings = opened.findings
    checks = check_health(history, opened.layers, findings=findings)
    planned = opened.info.get("total_steps")
    going = outlook(*history.scalar("loss"), planned if isinstance(planned, int) else None)
    error = opened.ending.error if opened.ending is not None else ""
    found = opened.integrity
    if as_json:
        ended = {"state": opened.state, "error": error, "steps": len(history)}
        damage = {"unreadable_bytes": found.unreadable_bytes, "damage": found.damage, "missing_steps": found.missing}
        print_json({**ended, **damage, "findings": findings, "health": checks, "outlook": going})
    else:
        from holter.diagnosis.render import render_damage, render_ending, render_findings, render_health, render_outlook

        screen = console()
        taken = int(history.steps[-1]) + 1 if len(history) else 0  # also where records are missing
        screen.print(render_ending(opened.state, error, taken), end="")
        screen.print(render_damage(found), end="")
        screen.print(render_findings(findings, len(history), opened.state))
        screen.print(render_health(checks))
        screen.print(render_outlook(going))
    if fail_on is not None and any(_SEVERITIES.index(one.severity) >= _SEVERITIES.index(fail_on) for one in findings):
        raise SystemExit(FOUND)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice([*_FILES, *_TOOLS]), required=True, help="Files, or a tool.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A directory.  [default: RUN/export]")
@click.option("--layers", metavar="N|all", help="For a tool: how many it is shown.  [default: 8]")
@click.option("--steps", metavar="FIRST:LAST", help="For a tool: only these.")
@click.option("--project", help="What W&B and Trackio call so, and MLflow an experiment.")
def export(
    run: Path, form: str, output: Path | None, layers: str | None, steps: str | None, project: str | None
) -> None:
    """Write RUN as tables (scalars, rows, histograms, extras), or send it to a tool as if it trained now."""
    given = {"-o": output, "--layers": layers, "--steps": steps, "--project": project}
    for option, forms in _TAKEN_BY.items():
        if given[option] is not None and form not in forms:
            raise click.UsageError(f"{option} is for --to {', '.join(forms)}: leave it out for {form}")
    from holter.run import open_run

    opened = readable(open_run(run))
    try:
        if form in _TOOLS:
            _send(opened, form, output or run / "export", layers or "8", steps or ":", project)
            return
        from holter.export import export as export_run

        exported = export_run(opened, form, output, lambda damage: click.echo(damage, err=True))
    except OSError as error:
        raise ValueError(f"cannot write {about(error)}. Name a directory you may write with -o") from error
    for file in exported:
        click.echo(f"{printable(str(file.path))}  {file.lines:,} lines, {size(file.path.stat().st_size)}")


def _send(run: Run, tool: str, directory: Path, layers: str, steps: str, project: str | None) -> None:
    from holter.send import WAYS_OUT, NotSent, records_in, send, span
    from holter.sinks.naming import make

    first, last = span(steps)
    records_in(run, first, last)  # before anything is made for nothing
    shown = layers if layers == "all" else _whole(layers)
    try:
        sink = make(tool, directory, layers=shown, project=project, run_name=run.path.resolve().name)
        sent, findings = send(run, sink, first, last)
    except ImportError as error:
        raise ValueError(str(error)) from error
    except NotSent as error:
        raise ValueError(f"{tool} failed with {error}: {WAYS_OUT[tool]}") from None
    place = f"tensorboard: {directory / 'tensorboard'}" if tool == "tensorboard" else tool
    if damage := run.integrity.sentence:
        click.echo(damage, err=True)
    click.echo(f"{sent:,} steps and {findings} finding{'s' * (findings != 1)} sent to {place}")


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--layers {text}: give a number, or all")
    return int(text)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def thresholds(as_json: bool) -> None:
    """Show the outer limits of the diagnosis; within them every series is judged by its own past."""
    from holter.diagnosis.thresholds import Thresholds, listed

    found = listed(Thresholds())
    if as_json:
        print_json([dict(zip(("name", "value", "requirement", "means"), line, strict=True)) for line in found])
        return
    from rich.table import Table

    table = Table("limit", "value", "of", box=None, pad_edge=False)
    for name, value, _, means in found:
        table.add_row(name, f"{value:g}" if value < 1e4 else f"{value:,.0f}", means)
    console().print(table)


for command in (report, serve, top, compare, clinic):
    main.add_command(command)
