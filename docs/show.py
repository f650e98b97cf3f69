"""Makes docs/show.svg: what `holter show` prints of a net that learns digits until its rate jumps.

python docs/show.py
"""

from __future__ import annotations

import io
import re
import tempfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import torch
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import holter
from holter.show import render_run
from holter.summary import summarise

NAME, ROLE, WIDTH = "runs/digits", "activation", 104
STEPS, JUMP = 300, 180
LAYERS = OrderedDict(
    conv1=nn.Conv2d(1, 16, 3, padding=1),
    relu1=nn.ReLU(),
    conv2=nn.Conv2d(16, 32, 3, padding=1),
    relu2=nn.ReLU(),
    pool=nn.MaxPool2d(2),
    conv3=nn.Conv2d(32, 64, 3, padding=1),
    relu3=nn.ReLU(),
    flat=nn.Flatten(),
    dense=nn.Linear(64 * 16, 64),
    tanh=nn.Tanh(),
    out=nn.Linear(64, 10),
)
# Not rich's own font, which a page would have to load from elsewhere.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, Consolas, monospace"
)


def train(run: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    model = nn.Sequential(LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    paces = {"every": 10, "updates": 100, "optimizer_state": 100, "activations": 50}
    with holter.watch(model, optimizer, run=run, budget=None, **paces) as monitor:
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.05 if step < JUMP else 2.0
            chosen = torch.randint(0, 1500, (768,))
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss, inputs=images[chosen], targets=labels[chosen])
            if step % 50 == 49:
                with torch.no_grad():
                    monitor.log(val_loss=F.cross_entropy(model(images[1500:]), labels[1500:]))


def picture(run: Path) -> str:
    summary = summarise(holter.open_run(run))
    roles = tuple(role for role in summary.roles if role.role == ROLE)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_terminal=True)
    console.print(f"$ holter show {NAME} --role {ROLE}", style="bold")
    console.print(render_run(replace(summary, path=NAME, roles=roles)))
    return console.export_svg(title="holter", code_format=FORMAT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "run")
        Path(__file__).with_suffix(".svg").write_text(picture(Path(folder) / "run"))
