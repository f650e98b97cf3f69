"""What the MLflow sink refuses when it is made, and that it tells no secrets then."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from holter.sinks.mlflow import MLflow, place_of


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


# Addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("sqlite:///{directory}/m.db?password=CANARY", "sqlite:///{directory}/m.db has no run"),
        ("nothing://CANARY:CANARY@host/runs?key=CANARY", "cannot open nothing://host/runs (Unsupported"),
        ("nothing://me:C/ANARY@host/runs", "cannot open nothing://… (Unsupported"),
        ("http://me:CANARY@127.0.0.1:9/?token=CANARY", "http://127.0.0.1:9/ has no run"),
    ],
)
def test_an_address_is_told_without_its_secrets(
    address: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P24: neither in the message nor in what a traceback would print of where it came from."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError) as caught:
        MLflow("0" * 32, tracking_uri=address.format(directory=tmp_path))
    printed = "".join(traceback.format_exception_only(caught.value))
    assert shown.format(directory=tmp_path) in printed and "tracking_uri" in printed
    assert "ANARY" not in printed and caught.value.__cause__ is None and caught.value.__suppress_context__


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:CANARY@host:5432/runs",
        "postgresql://me:CAN?ARY@host/runs",
        "postgresql://me:CAN#ARY@host/runs",
        "postgresql://me:CAN@ARY@host/runs",
        "postgresql://me:CAN/ARY@host/runs?a=b@c",
        "mysql+pymysql://host/runs?password=CANARY",
        "mysql+pymysql://host/runs?user=me@x&password=CANARY",
        "https://host/?token=CANARY#CANARY",
        "sqlite:///runs.db?key=CANARY",
        "runs?key=CANARY",
    ],
)
def test_no_address_keeps_a_secret(address: str) -> None:
    place = place_of(address)
    assert "CAN" not in place and "ARY" not in place
    assert place.partition(":")[0] == address.partition(":")[0].partition("?")[0]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"run_id": "0" * 32}, "has no run '0000"),
        ({"run_id": "0" * 32, "experiment": "holter"}, "leave out experiment='holter'"),
        ({"layers": -1}, 'or "all"'),
        ({"every": 0}, "1 for all"),
    ],
)
def test_bad_arguments_are_refused_with_the_way_out(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MLflow(**chosen)


def test_without_mlflow_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"pip install 'holter\[mlflow\]'"):
        MLflow()


def test_without_a_database_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As mlflow-skinny is installed."""
    monkeypatch.setitem(sys.modules, "mlflow.store.tracking.sqlalchemy_store", None)
    with pytest.raises(ImportError, match="pip install sqlalchemy alembic"):
        MLflow(tracking_uri=f"sqlite:///{tmp_path}/other.db")
