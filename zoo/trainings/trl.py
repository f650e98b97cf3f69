"""TRL: supervised fine-tuning, preferences and rewards, on a Llama of a few thousand parameters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from zoo.data import lines
from zoo.tokens import make_tokenizer
from zoo.trainee import Trainee
from zoo.training import Fault, Training


def small_llama(tokenizer: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def pretrain(model: nn.Module, tokenizer: Any, steps: int = 100) -> None:
    """Not watched: what a fine-tuning starts from."""
    found = lines(20, 60)[:600]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        chosen = [found[(16 * step + place) % len(found)] for place in range(16)]
        batch = tokenizer(chosen, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def arguments_of(trainee: Trainee) -> dict[str, Any]:
    return {
        "output_dir": str(trainee.directory / "out"),
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "logging_steps": 10,
        "max_steps": 50,
        "per_device_train_batch_size": 8,
        "gradient_checkpointing": False,
    }


def sft(trainee: Trainee) -> nn.Module:
    tokenizer = make_tokenizer()
    model = small_llama(tokenizer)
    pretrain(model, tokenizer)
    rate = 5e-4 * {"rate x 100": 100, "rate / 10,000": 1e-4}.get(str(trainee.fault), 1)
    arguments = SFTConfig(**{**arguments_of(trainee), "learning_rate": rate, "max_length": 64})
    data = Dataset.from_dict({"prompt": [line[:10] for line in lines()], "completion": [line[10:] for line in lines()]})
    callback = trainee.callback("transformers")
    SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[callback]).train()
    return model


def dpo(trainee: Trainee) -> nn.Module:
    """The end of the line against the end of another."""
    tokenizer = make_tokenizer()
    model = small_llama(tokenizer)
    pretrain(model, tokenizer)
    found = lines(30, 60)[:600]
    rejected = [*found[7:], *found[:7]]
    columns = {
        "prompt": [line[:12] for line in found],
        "chosen": [line[12:] for line in found],
        "rejected": [line[12:] for line in rejected],
    }
    arguments = DPOConfig(**{**arguments_of(trainee), "learning_rate": 1e-4, "max_length": 64, "warmup_steps": 5})
    data, callback = Dataset.from_dict(columns), trainee.callback("transformers")
    DPOTrainer(
        model, deepcopy(model), arguments, train_dataset=data, processing_class=tokenizer, callbacks=[callback]
    ).train()
    return model


def grpo(trainee: Trainee) -> nn.Module:
    """Rewards completions for vowels."""
    tokenizer = make_tokenizer()
    model = small_llama(tokenizer)
    pretrain(model, tokenizer)

    def vowels(completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(letter in "aeiou" for letter in text) / (len(text) + 1) for text in completions]

    options = {"learning_rate": 1e-4, "num_generations": 4, "max_completion_length": 16, "max_steps": 30}
    arguments = GRPOConfig(**{**arguments_of(trainee), **options})
    data = Dataset.from_dict({"prompt": [line[:12] for line in lines()[:400]]})
    callback = trainee.callback("transformers")
    GRPOTrainer(model, vowels, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[callback]).train()
    return model


TRAININGS = (
    Training(
        "trl/sft",
        sft,
        50,
        {"rate x 100": Fault(("lr-too-high",)), "rate / 10,000": Fault(("lr-too-low",))},
    ),
    Training("trl/dpo", dpo, 50),
    Training("trl/grpo", grpo, 30),
)
