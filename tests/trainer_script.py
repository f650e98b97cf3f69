"""One of two processes of a Trainer's training over gloo: python -m tests.trainer_script RANK PORT PLACE.

The second one alone wants to stop. Prints where it wrote, the step at which it ended and what its sink was given.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(rank: str, port: str, place: str) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.chdir(place)
    import torch

    from holter.monitor import Monitor
    from holter.sinks.memory import Memory
    from tests.test_integration_transformers import callback_of, trainer_of

    torch.set_num_threads(1)
    if rank == "1":
        Monitor.should_stop = property(lambda self: self.step > 6)  # type: ignore[assignment,method-assign]
    memory = Memory()
    callback: Any = callback_of(run=None, stop=True, sinks=[memory])
    trainer = trainer_of(Path(place), callback, max_steps=20, logging_steps=5, ddp_backend="gloo")
    trainer.train()
    told = {"run": str(callback.monitor.path), "step": trainer.state.global_step, "sink": len(memory.records)}
    print(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
