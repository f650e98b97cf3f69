"""Hugging Face transformers on text, by its Trainer and by plain loops; every model from a small configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from zoo.data import BYTES, Dictionaries, token_windows
from zoo.trainee import Trainee
from zoo.training import Fault, Training


def fit(trainee: Trainee, model: nn.Module, data: Any, **options: Any) -> nn.Module:
    """Train by a Trainer with its defaults but for what is given."""
    given = {"max_steps": 50, "per_device_train_batch_size": 16, "learning_rate": 1e-3, "warmup_steps": 5, **options}
    arguments = TrainingArguments(
        str(trainee.directory / "out"), report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, **given
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[trainee.callback("transformers")]).train()
    return model


def gpt2(trainee: Trainee) -> nn.Module:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=BYTES, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=0)
    )
    tokens = token_windows(800, 64)
    rate = 1e-3 * (100 if trainee.fault == "rate x 100" else 1)
    return fit(trainee, model, Dictionaries(input_ids=tokens, labels=tokens), learning_rate=rate)


TRAININGS = (Training("transformers/gpt2", gpt2, 50, {"rate x 100": Fault(("lr-too-high",))}),)
