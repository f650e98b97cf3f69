"""A run as the JSON that its page is drawn from, on the dashboard and in a report alike. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

import numpy as np

from holter.diagnosis.convergence import Outlook
from holter.diagnosis.thresholds import Thresholds, listed
from holter.record import ACTIVATIONS, OPTIMIZER_SETTINGS
from holter.report.digest import Digest
from holter.report.drawing import flows, histograms, map_id, ordered_strips, scalar_lines, strip_map, strip_title
from holter.report.examining import Examined
from holter.report.reading import Follower
from holter.report.told import order_of_events, told_findings
from holter.report.verdict import more, verdict_of
from holter.scalar_summary import STAGES
from holter.summary import as_json
from holter.words import amount, duration, number, share, size

Json = dict[str, Any]
_MOST_RESUMES = 100
_HISTOGRAM_ROLES = ("gradient", "weight", "activation")
_EXPECTED = {
    "gradient": "Gradients were not measured.",
    "update": "Updates were not measured: what a step does to the weights is not known.",
    "weight": "Weights were not measured.",
    "activation": "Activations were not measured: the model may be compiled as a whole, or activations=None was set.",
    "batch": "Batches were not logged: with monitor.log(inputs=..., targets=...) broken and repeated ones are found.",
}


def run_view(follower: Follower, examined: Examined, map_ids: Collection[str] | None = None) -> Json:
    """With `map_ids` only those strip charts are sent; the others are listed in `more_maps`."""
    digest = follower.digest
    strips = ordered_strips(digest)
    sent = [strip for strip in strips if map_ids is None or map_id(strip) in map_ids]
    verdict = verdict_of(examined.findings, follower.run_state, follower.steps)
    return {
        "run": _run(follower),
        "verdict": asdict(verdict),
        "findings": told_findings(examined.findings, digest),
        "events": order_of_events(examined.findings, examined.onsets),
        "health": as_json(examined.health),
        "outlook": outlook_sentence(examined.outlook),
        "signs": [{"text": sign.text, "since": sign.since, "level": sign.level} for sign in examined.signs],
        "scalars": scalar_lines(digest),
        "maps": [strip_map(digest, strip) for strip in sent],
        "more_maps": [strip_title(strip) for strip in strips if strip not in sent],
        "histograms": _histograms(digest) if map_ids is None else {},
        "flow": flows(digest),
        "machine": _machine(digest),
        "thresholds": [
            dict(zip(("name", "value", "requirement", "means"), line, strict=True)) for line in listed(Thresholds())
        ],
        "unobserved": _unobserved(follower, examined),
        "notes": _notes(follower, examined),
    }


def outlook_sentence(found: Outlook | None) -> str:
    if found is None:
        return ""
    said = ["The loss has stopped falling."] if found.is_flat else []
    if (one := found.forecast) is not None:
        said.append(
            f"At step {one.step:,} the loss is expected at {number(one.loss)}, and in nine of ten cases between "
            f"{number(one.low)} and {number(one.high)}."
        )
    return " ".join(said)


def _run(follower: Follower) -> Json:
    run, digest, info = follower.run, follower.digest, follower.run.info
    text = {name: info[name] if isinstance(info.get(name), str) else "" for name in ("model", "scheduler")}
    optimizers, versions = info.get("optimizers"), info.get("versions")
    return {
        "name": run.name,
        "state": follower.run_state,
        "error": follower.ending.error if follower.ending is not None else "",
        **text,
        "parameters": info["parameters"] if isinstance(info.get("parameters"), int) else None,
        "optimizers": [str(one) for one in optimizers] if isinstance(optimizers, list) else [],
        "versions": {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        "created": run.created,
        "steps": follower.steps,
        "last_step": digest.last_step,
        "segments": len(digest.segments),
        "resumed": digest.resumed[-_MOST_RESUMES:],
        "dropped": follower.ending.dropped if follower.ending is not None else 0,
        "unreadable_bytes": follower.unreadable_bytes,
        "seconds": follower.seconds,
        "monitor_cost": monitor_cost(digest),
        "has_no_budget": info.get("budget", 0.0) is None,
    }


def monitor_cost(digest: Digest) -> float | None:
    """The share of the time of all steps."""
    whole = digest.sums.get("step_time", 0.0)
    return digest.sums["monitor"] / whole if whole > 0 and "monitor_cost" in digest.scalars else None


def _usual(digest: Digest, name: str) -> float | None:
    """The median over the buckets; None where nothing finite was recorded."""
    values = digest.scalars[name].last[:, 0] if name in digest.scalars else np.zeros(0)
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _histograms(digest: Digest) -> Json:
    found = {role: histograms(digest.snapshots[role]) for role in _HISTOGRAM_ROLES if role in digest.snapshots}
    return {role: one for role, one in found.items() if one}


def _machine(digest: Digest) -> Json:
    known = {stage: digest.sums[f"time/{stage}"] for stage in STAGES if f"time/{stage}" in digest.sums}
    whole = sum(known.values())
    words: dict[str, tuple[str, Callable[[float], str]]] = {
        "step_time": ("a step takes", duration),
        "samples_per_second": ("samples a second", amount),
        "tokens_per_second": ("tokens a second", amount),
        "batch/size": ("batch", amount),
        "machine/process_memory": ("memory of the process", lambda value: size(int(value))),
        "machine/gpu_memory": ("memory of the GPU", lambda value: size(int(value))),
        "machine/gpu_utilisation": ("GPU in use", share),
        "machine/cpu_share": ("processor in use", share),
    }
    figures = [
        {"name": title, "text": tell(value)}
        for name, (title, tell) in words.items()
        if (value := _usual(digest, name)) is not None
    ]
    if (cost := monitor_cost(digest)) is not None:
        figures.append({"name": "watching costs", "text": share(cost)})
    return {"stages": {stage: seconds / whole for stage, seconds in known.items()} if whole else {}, "figures": figures}


def _unobserved(follower: Follower, examined: Examined) -> list[str]:
    digest = follower.digest
    roles = {role for role, _ in digest.strips}
    found = [sentence for role, sentence in _EXPECTED.items() if role not in roles]
    if note := digest.notes.get(ACTIVATIONS):
        found = [sentence for sentence in found if sentence != _EXPECTED["activation"]]
        found.append(f"Activations were {note}.")
    if note := digest.notes.get(OPTIMIZER_SETTINGS):
        found.append(f"Settings of optimizers were {note}.")
    for role in ("gradient", "batch"):
        if 0 < digest.looks.get(role, 0) < digest.count and not follower.is_sample:
            what = {"gradient": "Gradients", "batch": "Batches"}[role]
            found.append(
                f"{what} were measured in {digest.looks[role]:,} of {digest.count:,} steps, as often as was asked for "
                "and as the budget allows."
            )
    if "loss" not in digest.scalars:
        found.append("The loss was not logged: monitor.log(loss=loss).")
    if "time/data" not in digest.scalars:
        found.append("Waiting for data was not timed: for batch in monitor.batches(loader).")
    found += [f"{check.name}: {check.text}" for check in examined.health if check.state == "not observed"]
    if examined.sampled < 1:
        found.append(f"Health, outlook and signs were judged by {share(examined.sampled)} of the steps.")
    return found


def _notes(follower: Follower, examined: Examined) -> list[str]:
    found = []
    if not follower.run.info:
        found.append("run.json is missing or damaged: what was trained is not known.")
    if damage := follower.integrity.sentence:
        found.append(damage)
    if follower.is_sample:
        found.append(f"A sample of this long run; {share(follower.read_share)} of it has been read so far.")
    if follower.more_problems:
        found.append(f"{more(follower.more_problems, 'problem')} of Holter's own: see `holter diagnose`.")
    if not follower.digest.count:
        found.append("No step has been recorded.")
    return found
