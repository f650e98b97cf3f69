"""torch-geometric: a graph whose nodes are classified, and graphs that are classified in batches."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn  # noqa: F401  # once, before the trainings are forked
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from zoo.trainee import Trainee
from zoo.training import Fault, Training


def train_gcn(trainee: Trainee) -> nn.Module:
    """Find the communities of one graph from features that are mostly noise; the whole graph is the batch."""
    from torch_geometric.nn import GCN
    from torch_geometric.utils import stochastic_blockmodel_graph

    sizes, between = [60, 60, 60], torch.full((3, 3), 0.01) + torch.eye(3) * 0.1
    edges = stochastic_blockmodel_graph(sizes, between)
    classes = torch.arange(3).repeat_interleave(60)
    features = torch.randn(180, 16)
    features[:, :3] += nn.functional.one_hot(classes, 3)
    known = torch.rand(180) < 0.3
    model = GCN(16, 32, num_layers=2, out_channels=3, dropout=0.5)
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    monitor = trainee.watch(model, optimizer)
    model.train()
    for _ in range(80):
        optimizer.zero_grad()
        loss = cross_entropy(model(features, edges)[known], classes[known])
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss)
    return model


class GraphClassifier(nn.Module):
    def __init__(self) -> None:
        from torch_geometric.nn import GIN, MLP

        super().__init__()
        self.gnn = GIN(1, 32, num_layers=3)
        self.head = MLP([32, 32, 2], norm=None, dropout=0.2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_add_pool

        out: Tensor = self.head(global_add_pool(self.gnn(x, edge_index), batch))
        return out


def make_graph(dense: bool) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.utils import erdos_renyi_graph

    edges = erdos_renyi_graph(int(torch.randint(8, 15, ())), 0.5 if dense else 0.25)
    return Data(x=torch.ones(15, 1), edge_index=edges, y=torch.tensor([int(dense)]))


def train_gin(trainee: Trainee) -> nn.Module:
    from torch_geometric.loader import DataLoader

    loader = DataLoader([make_graph(index % 2 == 0) for index in range(320)], batch_size=32, shuffle=True)
    model = GraphClassifier()
    model.gnn.convs[1].requires_grad_(trainee.fault != "frozen convolution")
    optimizer = Adam(model.parameters(), lr=3e-3)
    monitor = trainee.watch(model, optimizer)
    for _ in range(6):
        for batch in monitor.batches(loader):
            loss = cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
            if trainee.fault != "no zero_grad":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss, targets=batch.y)
    return model


TRAININGS = (
    Training("torch-geometric/gcn", train_gcn, 80),
    Training(
        "torch-geometric/gin",
        train_gin,
        60,
        {
            "no zero_grad": Fault(("zero-grad-missing",)),
            "frozen convolution": Fault(("layer-frozen", "frozen-by-mistake"), "gnn.convs.1*"),
        },
    ),
)
