"""PEFT: adapters on a GPT-2 that was trained a little before."""

from __future__ import annotations

from typing import Any

import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from zoo.data import BYTES, Dictionaries, token_windows
from zoo.trainee import Trainee
from zoo.training import Fault, Training


def pretrained() -> GPT2LMHeadModel:
    """Has seen bytes in upper case only."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=BYTES, n_positions=80, n_embd=64, n_layer=2, n_head=4, bos_token_id=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = token_windows(1600, 48)
    tokens = torch.where((tokens >= 97) & (tokens <= 122), tokens - 32, tokens)
    for step in range(80):
        batch = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(step))[:16]]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def lora(trainee: Trainee) -> nn.Module:
    base = pretrained()
    early = torch.optim.AdamW(base.parameters(), lr=2e-3)
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    )
    if trainee.fault == "an adapter frozen":
        for name, parameter in model.named_parameters():
            if "h.1.attn" in name:
                parameter.requires_grad_(False)
    tokens = token_windows(800, 48)
    arguments = TrainingArguments(
        str(trainee.directory / "out"),
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        warmup_steps=5,
    )
    data = Dictionaries(input_ids=tokens, labels=tokens)
    given: Any = (early if trainee.fault == "the optimizer was made before the adapters" else None, None)
    callbacks = [trainee.callback("transformers")]
    Trainer(model, arguments, train_dataset=data, optimizers=given, callbacks=callbacks).train()
    return model


def loop(trainee: Trainee, model: nn.Module, rate: float, steps: int = 60) -> nn.Module:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=rate)
    monitor = trainee.watch(model, optimizer)
    tokens = token_windows(800, 48)
    model.train()
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens), (16,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=batch)
    return model


def ia3(trainee: Trainee) -> nn.Module:
    config = IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True)
    return loop(trainee, get_peft_model(pretrained(), config), 1e-2)


def prefix(trainee: Trainee) -> nn.Module:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    return loop(trainee, get_peft_model(pretrained(), config), 1e-2)


TRAININGS = (
    Training(
        "peft/lora",
        lora,
        60,
        {
            "the optimizer was made before the adapters": Fault(("optimizer-holds-other-parameters",)),
            "an adapter frozen": Fault(("layer-frozen",), "*h.1.attn*"),
        },
    ),
    Training("peft/ia3", ia3, 60),
    Training("peft/prefix-tuning", prefix, 60),
)
