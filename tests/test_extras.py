"""Every extra is enough by itself: what it is for works where the packages of all the others are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What an extra is for, and the packages that may be there. Lightning's torchmetrics takes what it finds of others.
USES = {
    "tensorboard": ("make('tensorboard', here)", ["tensorboard"]),
    "wandb": ("make('wandb', here)", ["wandb"]),
    "mlflow": ("make('mlflow', here)", ["mlflow"]),
    "trackio": ("make('trackio', here)", ["trackio"]),
    "alerts": (
        "from holter.alerts import Alerts; Alerts(['slack://AAAAAAAAA/BBBBBBBBB/CCCCCCCCCCCCCCCCCCCCCCCC'])",
        ["apprise"],
    ),
    "accelerate": ("import holter.integrations.accelerate", ["accelerate"]),
    "transformers": ("import holter.integrations.transformers", ["transformers", "accelerate"]),
    "lightning": ("import holter.integrations.lightning", ["lightning", "pytorch_lightning", "transformers"]),
}
SLOW = ("accelerate", "transformers", "lightning")  # to import
PACKAGES = sorted({package for _, packages in USES.values() for package in packages})
BEGIN = """
import sys
from pathlib import Path
for name in {missing!r}:
    sys.modules[name] = None
from holter.sinks.naming import make
here = Path({here!r})
"""


@pytest.mark.parametrize(
    "extra", [pytest.param(one, marks=[pytest.mark.gauntlet] if one in SLOW else []) for one in USES]
)
def test_an_extra_is_enough_by_itself(extra: str, tmp_path: Path) -> None:
    use, brought = USES[extra]
    done = _run(use, [package for package in PACKAGES if package not in brought], tmp_path)
    assert done.returncode == 0, done.stderr


def _run(use: str, missing: list[str], here: Path) -> subprocess.CompletedProcess[str]:
    code = BEGIN.format(missing=missing, here=str(here)) + use
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100, cwd=here
    )
