"""ultralytics: the smallest YOLO from its yaml, by its own trainer with callbacks, on digits strewn over a canvas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import ultralytics  # noqa: F401  # once, before the trainings are forked
from torch import nn

from zoo.trainee import Trainee
from zoo.training import Training


def write_images(folder: Path, count: int) -> Path:
    """Write canvases of 64 x 64 with two digits each, their boxes, and the yaml that names them; return its path."""
    import cv2
    from sklearn.datasets import load_digits

    digits, generator = load_digits(), numpy.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for index in range(count):
        canvas, boxes = numpy.zeros((64, 64), numpy.uint8), []
        for column in (0, 32):
            which, left, top = (
                generator.integers(len(digits.images)),
                column + generator.integers(8),
                generator.integers(40),
            )
            canvas[top : top + 24, left : left + 24] = cv2.resize(digits.images[which] * 15, (24, 24)).astype(
                numpy.uint8
            )
            boxes.append(f"{digits.target[which]} {(left + 12) / 64} {(top + 12) / 64} {24 / 64} {24 / 64}")
        cv2.imwrite(str(folder / "images" / f"{index}.png"), canvas)
        (folder / "labels" / f"{index}.txt").write_text("\n".join(boxes))
    names = "".join(f"  {digit}: '{digit}'\n" for digit in range(10))
    described = folder / "digits.yaml"
    described.write_text(f"path: {folder}\ntrain: images\nval: images\nnames:\n{names}")
    return described


def train_yolo(trainee: Trainee) -> nn.Module:
    from ultralytics import YOLO

    watched: dict[str, Any] = {}

    def start(trainer: Any) -> None:
        watched["monitor"] = trainee.watch(trainer.model, trainer.optimizer)

    def log(trainer: Any) -> None:
        watched["monitor"].log(loss=trainer.loss)

    yolo = YOLO("yolov8n.yaml", verbose=False)
    yolo.add_callback("on_train_start", start)
    yolo.add_callback("on_train_batch_end", log)
    yolo.train(
        data=str(write_images(trainee.directory / "digits", 64)),
        epochs=8,
        batch=16,
        nbs=16,
        imgsz=64,
        optimizer="AdamW",
        lr0=2e-3,
        warmup_epochs=1,
        val=False,
        plots=False,
        save=False,
        workers=0,
        device="cpu",
        amp=False,
        project=str(trainee.directory / "out"),
        verbose=False,
        seed=0,
        mosaic=0.5,
        fliplr=0.0,
    )
    trained: nn.Module = yolo.trainer.model
    return trained


TRAININGS = (Training("ultralytics/yolov8n", train_yolo, 32),)
