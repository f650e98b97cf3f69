"""A GPT of twelve layers in whatever way people train one: recorded in full, and not one bit is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import holter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        z: Tensor = x + self.mlp(self.norm2(x))
        return z


class GPT(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.h = nn.ModuleList([Block() for _ in range(12)])
        self.is_checkpointed = is_checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        logits: Tensor = self.head(x)
        return logits


WAYS = ("bf16", "fp16 and scaler", "autocast", "compiled", "checkpointed")
NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train_gpt(way: str, device: str, watched: bool) -> tuple[nn.Module, holter.Monitor | None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = GPT(way == "checkpointed").to(device)
    if way == "bf16":
        net = net.bfloat16()
    model: Any = torch.compile(net) if way == "compiled" else net
    ids = torch.randint(64, (16, 33), device=device)
    if way == "cuda graphs":  # which must come before any hook
        model = torch.cuda.make_graphed_callables(net, (ids[:, :-1].contiguous(),))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10) if way == "fp16 and scaler" else None
    options: dict[str, Any] = {"budget": None, "activations": 2, "updates": 1, "weights": 1, "scaler": scaler}
    monitor = holter.watch(model, optimizer, run=False, **options) if watched else None
    half = torch.float16 if scaler is not None else torch.bfloat16
    for _ in range(6):
        with torch.autocast(device, half, enabled=way in ("autocast", "fp16 and scaler")):
            logits = model(ids[:, :-1].contiguous())
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        (scaler.scale(loss) if scaler is not None else loss).backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=way != "cuda graphs")
        if monitor is not None:
            monitor.log(loss=loss)
    if monitor is not None:
        monitor.close()
    return net, monitor


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.filterwarnings("ignore")  # Dynamo and CUDA graphs warn of much
@pytest.mark.parametrize(
    ("way", "device"),
    [
        *((way, "cpu") for way in WAYS),
        *(pytest.param(way, "cuda", marks=NEEDS_A_GPU) for way in (*WAYS, "cuda graphs")),
    ],
)
def test_a_gpt_is_recorded_in_whatever_way_it_is_trained(way: str, device: str) -> None:
    """P2, and nothing is missing: of CUDA graphs the activations, which a note says."""
    bare, _ = train_gpt(way, device, watched=False)
    watched, monitor = train_gpt(way, device, watched=True)
    assert monitor is not None
    for one, other in zip(bare.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    for role in ("gradient", "weight", "update"):
        steps, layers, norms = monitor.history.series(role, "norm")
        assert len(steps) >= 5 and set(layers) == {name for name, _ in bare.named_parameters()}
        assert (norms[-1] > 0).any()
    notes = [record.notes.get("activations", "") for record in monitor.history.records]
    if way == "cuda graphs":
        assert any(note.startswith("not observed") for note in notes)
        return
    assert {f"h.{place}.mlp.1" for place in range(12)} <= set(monitor.history.layers("activation"))
    assert {f"h.{place}.attn" for place in range(12)} == set(monitor.history.layers("attention"))
    assert any(note.startswith("seen in an uncompiled forward") for note in notes) == (way == "compiled")
