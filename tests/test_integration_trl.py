"""HolterCallback in TRL's SFTTrainer: its own losses, and norms before its clip, step by step."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import holter

STEPS = 50
LETTERS = [chr(code) for code in range(32, 127)]


def tokenizer() -> Any:
    """A token a letter: nothing is downloaded."""
    tokenizers = import_module("tokenizers")
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<end>", *LETTERS])}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast = import_module("transformers").PreTrainedTokenizerFast
    return fast(tokenizer_object=letters, pad_token="<pad>", eos_token="<end>")


def test_a_supervised_fine_tuning_is_seen_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    trl, datasets, transformers = (import_module(name) for name in ("trl", "datasets", "transformers"))
    text = Path(os.__file__).read_text("utf-8")
    lines = datasets.Dataset.from_dict({"text": [text[place : place + 60] for place in range(0, 60 * 200, 60)]})
    config = transformers.GPT2Config(
        vocab_size=len(LETTERS) + 2, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    )
    callback = import_module("holter.integrations.transformers").HolterCallback(run=tmp_path / "run", budget=None)
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=2, max_length=64,
        gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=1e-3, logging_steps=1, bf16=False, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=lines,
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    told = [line for line in trainer.state.log_history if "grad_norm" in line]
    run = holter.open_run(tmp_path / "run")
    assert len(told) == len(run.history) == STEPS and run.state == "finished" and not run.problems
    assert run.history.scalar("loss")[1].tolist() == pytest.approx([line["loss"] for line in told], rel=1e-6)
    norms = [line["grad_norm"] for line in told]
    assert run.history.scalar("gradient_norm")[1].tolist() == pytest.approx(norms, rel=1e-6)
    assert min(norms) > 0.5  # so each was clipped
    assert run.history.scalar("clip_max_norm")[1].tolist() == [0.5] * STEPS
