"""The commands of the clinic."""

from __future__ import annotations

import os
from pathlib import Path

import click

from holter.terminal import console


@click.group()
def clinic() -> None:
    """Real trainings with known faults and their healthy twins: train them, list them, score the diagnosis."""
    # Threads that spin while they wait would take the cores from the other trainings.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_SPLITS = click.Choice(["development", "held-out", "all"])
_JOBS = click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Processes at a time.")
_ONLY = click.option("--only", metavar="PATTERN", help="Cases whose id fits, such as lr-jump or '*/transformer/*'.")


@clinic.command("run")
@_ONLY
@click.option("--split", type=_SPLITS, default="all", show_default=True, help="Which half.")
@_JOBS
@click.option("--into", "root", type=click.Path(path_type=Path), default="runs/clinic", show_default=True)
def clinic_run(only: str | None, split: str, jobs: int, root: Path) -> None:
    """Train the cases that are missing, or that other code has made. All of them take some minutes."""
    from holter.clinic.commands import run

    if run(console(), only=only, split=split, jobs=jobs, root=root):
        raise click.exceptions.Exit(1)


@clinic.command("show")
@click.argument("case", required=False)
@click.option("--from", "root", type=click.Path(path_type=Path), default="runs/clinic", show_default=True)
def clinic_show(case: str | None, root: Path) -> None:
    """List the cases, those that fit a pattern, or show one CASE."""
    from holter.clinic.commands import show

    show(console(), case, root)


@clinic.command("score")
@_ONLY
@click.option("--split", type=_SPLITS, default="held-out", show_default=True, help="Which half.")
@_JOBS
@click.option("--from", "root", type=click.Path(path_type=Path), default="runs/clinic", show_default=True)
@click.option("--into", "document", type=click.Path(path_type=Path), help="Also write it as Markdown.")
@click.option("--no-rivals", is_flag=True, help="Only Holter's own diagnosis.")
@click.option("--as-stored", is_flag=True, help="Judge what is there, whatever code made it; train nothing.")
def clinic_score(
    only: str | None, split: str, jobs: int, root: Path, document: Path | None, no_rivals: bool, as_stored: bool
) -> None:
    """Score the diagnosis, and the rules of others, on the cases; what is missing is trained first."""
    from holter.clinic.commands import score

    failed = score(
        console(),
        split=split,
        only=only,
        jobs=jobs,
        root=root,
        into=document,
        rivals=not no_rivals,
        train=not as_stored,
    )
    if failed:
        raise click.exceptions.Exit(1)
