"""One of two processes of a DDP training over gloo: python -m tests.ddp_script RANK RUN. Prints what a clock saw."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import distributed, nn

import holter

STEPS, PAUSE = 10, 0.05  # DDP takes the times of its first ten iterations


def main(rank: int, run: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo", init_method=f"file://{run}.store", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)))
    reductions: list[float] = []
    model.register_comm_hook(reductions, reduce_and_time)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with holter.watch(model, optimizer, run=run, budget=None) as monitor:
        for step in range(STEPS):
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(x).square().mean()
            distributed.barrier()
            if rank == 1:
                time.sleep(PAUSE)  # so that the other one has to wait for this one's gradients
            began = time.perf_counter()
            loss.backward()
            backward = time.perf_counter() - began
            optimizer.step()
            optimizer.zero_grad()
            seen.append({"reduction": sum(reductions), "backward": backward, "loss": float(loss.detach())})
            reductions.clear()
            monitor.log(loss=loss)
    weights = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    print(json.dumps({"seen": seen, "weights": weights}))
    distributed.destroy_process_group()


def reduce_and_time(times, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, not at their texts
    """DDP's own reduction, an average, with a clock around it."""
    began = time.perf_counter()
    work = distributed.all_reduce(bucket.buffer(), async_op=True)

    def ended(done: Any) -> torch.Tensor:
        times.append(time.perf_counter() - began)
        return done.value()[0].div_(2)  # type: ignore[no-any-return]

    return work.get_future().then(ended)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
