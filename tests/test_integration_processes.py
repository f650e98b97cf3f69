"""A Trainer in two processes, watched in both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holter
from holter.run import Run

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.mark.timeout(240)  # two processes import transformers
def test_several_processes_write_to_one_run_and_stop_together(tmp_path: Path) -> None:
    """P8: one that stopped alone would leave the other waiting for ever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    commands = [[sys.executable, "-m", "tests.trainer_script", rank, port, str(tmp_path)] for rank in "01"]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) for command in commands]
    try:
        told = [json.loads(rank.communicate(timeout=200)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert told[0]["run"] == told[1]["run"]
    run = holter.open_run(told[0]["run"])
    assert [rank for rank, _ in run.journals] == [0, 1]
    assert [one["step"] for one in told] == [10, 10], "the second wanted to at 7; they log at 5, 10, 15"
    assert told[0]["sink"] >= 10 and told[1]["sink"] == 0
    histories = [Run(run.path, rank).history for rank in (0, 1)]
    assert [len(history) for history in histories] == [10, 10]
    assert not np.allclose(*(history.scalar("loss")[1] for history in histories)), "each has batches of its own"
    np.testing.assert_allclose(*(history.scalar("gradient_norm")[1] for history in histories), rtol=1e-6)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
