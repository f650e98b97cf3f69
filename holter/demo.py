"""The demonstration: a real byte-level GPT learns Python from the standard library's own source, and is watched.

Nothing is downloaded, and a seed fixes everything. `train` is the whole of it; `DemoSettings` is all that can be
changed, and `on_step` sees every step with the training itself at hand.
"""

from __future__ import annotations

import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from holter.demo_model import ByteGPT
from holter.demo_progress import progress_on
from holter.monitor import Monitor
from holter.remedies import get_linear_schedule_with_warmup
from holter.watching import watch


@dataclass(frozen=True)
class DemoSettings:
    """What is trained, and how. The defaults take about half a minute on two cores."""

    steps: int = 200
    seed: int = 0
    batch: int = 16
    context: int = 128  # bytes that the model sees at once
    depth: int = 6
    width: int = 128
    heads: int = 4
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0

    @property
    def tokens(self) -> int:
        """Bytes learned from in one step."""
        return self.batch * self.context


@dataclass(frozen=True)
class Step:
    """What became known of one step."""

    number: int
    loss: float
    gradient_norm: float  # before clipping
    tokens_per_second: float


class Training:
    """The moving parts of one training, built from the settings alone: two of them take exactly the same steps."""

    def __init__(self, settings: DemoSettings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.model = ByteGPT(depth=settings.depth, width=settings.width, heads=settings.heads, context=settings.context)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, settings.warmup_steps, settings.steps)
        self._batches = batches(read_corpus(), settings)

    def step(self, clip: Callable[[float], Tensor]) -> tuple[Tensor, Tensor]:
        """One step on the next batch: its loss, and the norm of its gradients as `clip(max_norm)` returned it."""
        self.inputs, self.targets = next(self._batches)
        loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())
        loss.backward()
        norm = clip(self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach(), norm


OnStep = Callable[[Training, Step], None]


def train(
    settings: DemoSettings, *, run: str | os.PathLike[str] | None = None, on_step: OnStep | None = None
) -> Monitor:
    """Trains under a monitor, which is returned closed: what it recorded is in its `path`."""
    training = Training(settings)
    with watch(
        training.model,
        training.optimizer,
        run=run,
        scheduler=training.scheduler,
        total_steps=settings.steps,
    ) as monitor:
        for number in range(settings.steps):
            began = time.perf_counter()
            loss, norm = training.step(monitor.clip_grad_norm_)
            speed = settings.tokens / (time.perf_counter() - began)
            monitor.log(loss=loss, inputs=training.inputs, targets=training.targets)
            if on_step is not None:
                on_step(training, Step(number, float(loss), float(norm), speed))
    return monitor


def read_corpus() -> Tensor:
    """The source files at the top of the standard library, one after the other by name: uint8 [bytes]."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    if not text:
        raise ValueError(f"the demo learns from the Python standard library, but {library} holds no source files")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(corpus: Tensor, settings: DemoSettings) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the corpus, for ever: bytes and the byte that follows each, int64 [batch, context]."""
    random = torch.Generator().manual_seed(settings.seed)
    window = torch.arange(settings.context + 1)
    while True:
        starts = torch.randint(len(corpus) - settings.context, (settings.batch, 1), generator=random)
        bytes_ = corpus[starts + window].long()
        yield bytes_[:, :-1], bytes_[:, 1:]


_LINES = 10  # that are printed where there is no terminal


@contextmanager
def shown_on(console: Console, steps: int) -> Iterator[OnStep]:
    """An `on_step` that shows the training."""
    with progress_on(console, steps, _LINES) as show:
        yield lambda _, step: show(step.number + 1, _describe(step))


def _describe(step: Step) -> str:
    speed = f"{step.tokens_per_second:>6,.0f} tokens/s"
    return f"loss {step.loss:5.3f}  gradient norm {step.gradient_norm:5.3f}  {speed}"
