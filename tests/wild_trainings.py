"""Small trainings as people write them, and all that is said of them by the rules together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holter
from holter.diagnosis.finding import Finding

Batch = tuple[Tensor, Tensor]
CLASSES, WORDS, INPUTS = 6, 40, 20


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


@dataclass
class Training:
    """A model, its batches by step, and how it is trained."""

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    optimizer: torch.optim.Optimizer | None = None
    steps: int = 50
    autocast: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    accumulate: int = 1
    before: Callable[[int], object] = lambda step: None

    def findings(self, **options: Any) -> tuple[Finding, ...]:
        """What is said of it in the end."""
        torch.set_num_threads(1)
        chosen = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = self.optimizer or torch.optim.AdamW(chosen, 1e-3)
        with holter.watch(self.model, optimizer, run=False, scaler=self.scaler, **options) as monitor:
            for step in range(self.steps):
                self.before(step)
                self._step(step, optimizer, monitor)
            assert monitor.flush(30)
            return monitor.findings

    def _step(self, step: int, optimizer: torch.optim.Optimizer, monitor: holter.Monitor) -> None:
        for part in range(self.accumulate):
            x, y = self.batch(step * self.accumulate + part)
            precision = torch.autocast("cpu", self.autocast) if self.autocast else contextlib.nullcontext()
            with precision:
                loss = self.loss(self.model(x), y) / self.accumulate
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()
        monitor.log(loss=loss * self.accumulate, inputs=x, targets=y)


def alarms(training: Training, **options: Any) -> list[tuple[str, str | None]]:
    """Causes and layers of the findings that are more than a note."""
    found = training.findings(**options)
    assert not any(finding.cause == "monitor-degraded" for finding in found), found
    return [(finding.cause, finding.layer) for finding in found if finding.severity != "info"]


# Batches ----------------------------------------------------------------------------------------------------------


def _centred(*shape: int, size: int, noise: float) -> Callable[[int], Batch]:
    centres = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(1))

    def batch(step: int) -> Batch:
        random = torch.Generator().manual_seed(1000 + step)
        y = torch.randint(CLASSES, (size,), generator=random)
        return centres[y] + noise * torch.randn(size, *shape, generator=random), y

    return batch


def vectors(size: int = 32, width: int = INPUTS, noise: float = 1.0) -> Callable[[int], Batch]:
    return _centred(width, size=size, noise=noise)


def images(size: int = 16, side: int = 16) -> Callable[[int], Batch]:
    return _centred(3, side, side, size=size, noise=1.0)


def numbers(width: int = 1, size: int = 32) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        random = torch.Generator().manual_seed(1000 + step)
        x = 4 * torch.rand(size, width, generator=random) - 2
        return x, torch.sin(2 * x.sum(1, keepdim=True)) + 0.1 * torch.randn(size, 1, generator=random)

    return batch


def sentences(size: int = 16, length: int = 16) -> Callable[[int], Batch]:
    follows = torch.softmax(2.5 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1)), -1)

    def batch(step: int) -> Batch:
        random = torch.Generator().manual_seed(1000 + step)
        words = [torch.randint(WORDS, (size,), generator=random)]
        for _ in range(length):
            words.append(torch.multinomial(follows[words[-1]], 1, generator=random)[:, 0])
        text = torch.stack(words, 1)
        return text[:, :-1], text[:, 1:]

    return batch


# Models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention by hand; the keys have a bias, whose gradient is zero but for rounding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Gpt(nn.Module):
    """`unused` words are in the table and in no text."""

    def __init__(self, width: int = 32, depth: int = 2, unused: int = 0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS + unused, width), nn.Embedding(64, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS + unused, bias=False)
        for table in (self.wte, self.wpe, self.head):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


class Vit(nn.Module):
    """Its class token, mask token and pooler are declared; of these only the first is used."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch, self.pooler = nn.Conv2d(3, width, 4, 4), nn.Linear(width, width)
        self.cls, self.mask = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def embed(self, x: Tensor) -> Tensor:
        return self.patch(x).flatten(2).mT

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.embed(x)], 1) + self.pos
        return self.head(self.norm(self.encoder(x))[:, 0])


class Adapted(nn.Module):
    """LoRA beside a frozen layer."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def adapted(model: Gpt) -> Gpt:
    model.requires_grad_(False)
    for block in model.h:
        assert isinstance(block, Block)
        block.q, block.v = Adapted(block.q), Adapted(block.v)  # type: ignore[assignment]
    return model


class Scan(nn.Module):
    """A state-space block as in Mamba: its rates of decay are kept as logarithms."""

    def __init__(self, width: int = 16, states: int = 16) -> None:
        super().__init__()
        inner = 2 * width
        self.norm, self.in_proj = nn.LayerNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.x_proj, self.dt_proj = nn.Linear(inner, 1 + 2 * states, bias=False), nn.Linear(1, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(inner, 1))
        self.D, self.out_proj = nn.Parameter(torch.ones(inner)), nn.Linear(inner, width, bias=False)
        nn.init.constant_(self.dt_proj.bias, -4.6)
        self.states = states

    def forward(self, u: Tensor) -> Tensor:
        x, z = self.in_proj(self.norm(u)).chunk(2, -1)
        step, into, out_of = self.x_proj(x).split([1, self.states, self.states], -1)
        step, decay = F.softplus(self.dt_proj(step)), -torch.exp(self.A_log)
        state, seen = torch.zeros(()), []
        for t in range(u.shape[1]):
            state = (
                torch.exp(step[:, t, :, None] * decay) * state + (step[:, t] * x[:, t])[..., None] * into[:, t, None]
            )
            seen.append((state * out_of[:, t, None]).sum(-1))
        return u + self.out_proj((torch.stack(seen, 1) + x * self.D) * F.silu(z))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(WORDS, 16), nn.ModuleList([Scan(), Scan()])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WORDS, bias=False)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
