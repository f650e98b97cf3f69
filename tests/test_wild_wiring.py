"""How the layers of real models hang together: unused parts, tasks that take turns, adapters, and what is cut off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.wild_trainings import (
    CLASSES,
    INPUTS,
    WORDS,
    Gpt,
    Mamba,
    Training,
    Vit,
    adapted,
    alarms,
    images,
    sentences,
    vectors,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Gated(nn.Module):
    """A number of the model's own, declared before all that runs and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.stem, self.gate, self.head = nn.Linear(INPUTS, 32), nn.Linear(INPUTS, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.stem(x)) * torch.sigmoid(self.gate(x)))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.norm, self.up = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(self.norm(x)))


class Parted(nn.Module):
    """Each block, and the model, has a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.old_stem, self.stem = nn.Linear(INPUTS, 32), nn.Linear(INPUTS, 32)
        self.blocks, self.head = nn.Sequential(Part(), Part()), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class Wrapped(nn.Module):
    """What is never called lies in a module that runs, before all that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Parted()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Tasks(nn.Module):
    """Two heads; `turn` says which of them a step trains."""

    def __init__(self, turn: Callable[[int], bool]) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(INPUTS, 32), nn.Linear(32, CLASSES), nn.Linear(32, CLASSES)
        self.turn, self.calls = turn, 0

    def forward(self, x: Tensor) -> Tensor:
        head = self.b if self.turn(self.calls) else self.a
        self.calls += 1
        return head(torch.relu(self.stem(x)))


def only_head_held(model: nn.Module) -> Training:
    return Training(model, images(), optimizer=torch.optim.AdamW(model.get_submodule("head").parameters(), 1e-3))


HEALTHY: dict[str, Callable[[], Training]] = {
    "a number that is not used": lambda: Training(Gated(), vectors()),
    "layers that are not called": lambda: Training(Parted(), vectors()),
    "in a part that runs": lambda: Training(Wrapped(), vectors()),
    "tokens and a pooler that are not used": lambda: Training(Vit(), images(), steps=20),
    "heads in turn": lambda: Training(Tasks(lambda step: step % 2 == 1), vectors()),
    "heads by stages": lambda: Training(Tasks(lambda step: step // 20 % 2 == 1), vectors(), steps=90),
    "a rare head": lambda: Training(Tasks(lambda step: step % 10 == 9), vectors(), steps=60),
    "a probe on a backbone that is not frozen": lambda: only_head_held(Vit()),
    "a probe with a loss of its own": lambda: probe_with_a_loss_of_its_own(),
    "adapters in a line": lambda: bottleneck(),
    "adapters": lambda: Training(adapted(Gpt()), sentences(8), steps=20),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_not_warned_of(name: str) -> None:
    assert alarms(HEALTHY[name]()) == []


class CutVit(Vit):
    def embed(self, x: Tensor) -> Tensor:
        return super().embed(x).detach()


class CutReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reader(x.unflatten(1, (-1, 8)))[0][:, -1].detach())


class CutAttention(nn.Module):
    """torch's attention uses its output layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(WORDS, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0].detach())


def adapters_made_after_the_optimizer() -> Training:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    adapted(model).head.requires_grad_(True)
    return Training(model, sentences(8), optimizer=optimizer)


def adapters_beside_a_head() -> Training:
    model = adapted(Gpt())
    model.head.requires_grad_(True)
    return Training(model, sentences(8), optimizer=torch.optim.AdamW(model.head.parameters(), 1e-3))


def body_made_after_the_optimizer() -> Training:
    """All but the head is loaded anew: what the optimizer holds is most of a model that is gone."""
    model, other = Vit(), Vit()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for name, part in other.named_children():
        if name != "head":
            setattr(model, name, part)
    for name, own in other.named_parameters(recurse=False):
        setattr(model, name, own)
    return Training(model, images(), optimizer=optimizer)


def probe_with_a_loss_of_its_own() -> Training:
    """The optimizer holds the head, and a number of the loss; the body is left alone on purpose."""
    model, temperature = Vit(), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW([*model.get_submodule("head").parameters(), temperature], 1e-3)
    return Training(
        model, images(), optimizer=optimizer, loss=lambda output, y: F.cross_entropy(output * temperature.exp(), y)
    )


def frozen_head() -> Training:
    model = Vit()
    model.head.requires_grad_(False)
    return Training(model, images())


class Forgetful(torch.optim.AdamW):
    """Writes its steps to copies of these parameters."""

    forgets: tuple[nn.Parameter, ...] = ()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        kept = [parameter.detach().clone() for parameter in self.forgets]
        super().step(closure)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter, value in zip(self.forgets, kept, strict=True):
                parameter.copy_(value)


def forgetful(model: nn.Module, names: str, rate: float = 1e-3) -> Training:
    optimizer = Forgetful(model.parameters(), rate)
    optimizer.forgets = tuple(parameter for name, parameter in model.named_parameters() if names in name)
    return Training(model, sentences(8), optimizer=optimizer, steps=30)


def without_a_rate() -> Training:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 0.0)
    return Training(model, sentences(8), optimizer=optimizer)


def one_frozen_adapter() -> Training:
    model = adapted(Gpt(depth=3))
    adapter = model.h[1].get_submodule("q")
    for name in ("lora_a", "lora_b"):
        adapter.get_submodule(name).requires_grad_(False)
    return Training(model, sentences(8))


def bottleneck() -> Training:
    """Adapters between frozen layers, all in one line: only the sizes tell them apart."""
    parts: list[nn.Module] = []
    for _ in range(3):
        parts += [
            nn.Linear(INPUTS, INPUTS).requires_grad_(False),
            nn.Linear(INPUTS, 4),
            nn.ReLU(),
            nn.Linear(4, INPUTS),
        ]
    return Training(nn.Sequential(*parts, nn.Linear(INPUTS, CLASSES)), vectors())


FAULTS: dict[str, tuple[Callable[[], Training], str, str | None]] = {
    "patches cut off": (lambda: Training(CutVit(), images(), steps=20), "graph-detached", "patch"),
    "a reader cut off": (lambda: Training(CutReader(), vectors(width=64), steps=20), "graph-detached", "reader"),
    "attention cut off": (
        lambda: Training(CutAttention(), sentences(), steps=20),
        "graph-detached",
        "attention.out_proj",
    ),
    "adapters after the optimizer": (
        adapters_made_after_the_optimizer,
        "optimizer-holds-other-parameters",
        "h.0.q.lora_a",
    ),
    "a body after the optimizer": (body_made_after_the_optimizer, "optimizer-holds-other-parameters", "cls"),
    "adapters beside a head": (adapters_beside_a_head, "optimizer-holds-other-parameters", "h.0.q.lora_a"),
    "a frozen adapter": (one_frozen_adapter, "layer-frozen", "h.1.q.lora_a"),
    "a frozen head": (frozen_head, "layer-frozen", "head"),
    "a weight that is not written": (
        lambda: forgetful(Mamba(), "layers.1.in_proj.weight"),
        "weight-not-written",
        "layers.1.in_proj.weight",
    ),
    "one in half precision": (
        lambda: forgetful(Gpt().bfloat16(), "h.1.up.weight", 1e-2),
        "weight-not-written",
        "h.1.up.weight",
    ),
    "no weight that is written": (lambda: forgetful(Gpt(), ""), "weight-not-written", "wte.weight"),
    "a rate of zero": (without_a_rate, "lr-too-low", None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_such_a_model_is_named_within_50_steps(name: str) -> None:
    training, cause, layer = FAULTS[name]
    assert alarms(training())[:1] == [(cause, layer)]


class WithUnused(nn.Module):
    """Both heads run in every step, and the loss is that of one."""

    def __init__(self, unused: nn.Module) -> None:
        super().__init__()
        self.stem, self.head, self.unused = nn.Linear(INPUTS, 32), nn.Linear(32, CLASSES), unused

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.stem(x))
        self.unused(features)
        return self.head(features)


@pytest.mark.parametrize("unused", [nn.Linear(32, 2), nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 8), nn.Tanh())])
def test_what_runs_in_every_step_and_never_has_a_gradient_is_noted(unused: nn.Module) -> None:
    found = Training(WithUnused(unused), vectors(), steps=50).findings()
    assert [(one.cause, one.severity, str(one.layer)[:6]) for one in found] == [("graph-detached", "info", "unused")]
    assert found[0].step < 50


class Whispering(nn.Module):
    """A layer whose share of the output is too small for its gradient to move it."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.faint = nn.Linear(INPUTS, CLASSES), nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.loud(x) + 1e-15 * self.faint(x)


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_step_below_what_the_format_can_represent_is_not_lost_in_writing(adaptive: bool) -> None:
    model = Whispering()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3) if adaptive else torch.optim.SGD(model.parameters(), 0.1)
    training = Training(model, vectors(), optimizer=optimizer)
    assert "weight-not-written" not in [cause for cause, _ in alarms(training, budget=None)]


class Tapped(nn.Module):
    """Reads what comes in front of the last module of a line, which runs all the same."""

    def __init__(self, line: nn.Sequential) -> None:
        super().__init__()
        self.line, self.head = line, nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.line[-2].register_forward_hook(lambda module, args, output: seen.append(output))
        self.line(x)
        handle.remove()
        return self.head(seen[0])


class Branch(nn.Module):
    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.attend, self.feed, self.cut = nn.Linear(32, 32), nn.Linear(32, 32), cut

    def forward(self, x: Tensor) -> Tensor:
        attended = torch.tanh(self.attend(x))
        x = x + (attended.detach() if self.cut else attended)
        return x + torch.relu(self.feed(x))


def stem_and(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), *parts)


@pytest.mark.parametrize(
    ("line", "layer"),
    [
        (lambda: stem_and(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)), "line.4"),
        (lambda: stem_and(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), "line.4"),
        (lambda: stem_and(Branch(), Branch(), Branch()), "line.4"),
    ],
)
def test_the_end_of_a_line_of_which_less_is_used_is_noted(line: Callable[[], nn.Sequential], layer: str) -> None:
    found = Training(Tapped(line()), vectors()).findings()
    assert [(one.cause, one.severity, one.layer) for one in found] == [("graph-detached", "info", layer)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_branch_that_is_cut_off_in_any_block_is_named(place: int) -> None:
    parts = [Branch(cut=place == number) for number in range(3)]
    model = nn.Sequential(stem_and(*parts), nn.Linear(32, CLASSES))
    assert alarms(Training(model, vectors())) == [("graph-detached", f"0.{place + 2}.attend")]


class Heads(nn.Module):
    """The second of two like heads is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.heads = nn.Linear(INPUTS, 32), nn.ModuleList(nn.Linear(32, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.stem(x))
        return self.heads[0](features) + self.heads[1](features).detach()


def test_a_head_that_is_cut_off_beside_another_is_named() -> None:
    assert alarms(Training(Heads(), vectors())) == [("graph-detached", "heads.1")]
