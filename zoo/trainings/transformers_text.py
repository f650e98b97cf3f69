"""Hugging Face transformers on text, by its Trainer and by plain loops; every model from a small configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForQuestionAnswering,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from zoo.data import BYTES, Dictionaries, lines, token_windows
from zoo.trainee import Trainee
from zoo.training import Fault, Training

START, PAD, MASK = 256, 257, 258  # beside the bytes
VOCABULARY = 260


def fit(
    trainee: Trainee,
    model: nn.Module,
    data: Any,
    evaluation: Any = None,
    optimizers: Any = (None, None),
    **options: Any,
) -> nn.Module:
    """Train by a Trainer with its defaults but for what is given."""
    given = {"max_steps": 50, "per_device_train_batch_size": 16, "learning_rate": 1e-3, "warmup_steps": 5, **options}
    out = str(trainee.directory / "out")
    arguments = TrainingArguments(
        out, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=10, **given
    )
    Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=evaluation,
        optimizers=optimizers,
        callbacks=[trainee.callback("transformers")],
    ).train()
    return model


def language_data(count: int = 800, length: int = 64) -> Dictionaries:
    tokens = token_windows(count, length)
    return Dictionaries(input_ids=tokens, labels=tokens)


def padded(texts: list[str], length: int) -> tuple[Tensor, Tensor]:
    """Bytes of each text between a start and padding, and which of them are real."""
    rows = [[START, *text.encode("utf-8")][:length] for text in texts]
    tokens = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    return tokens, (tokens != PAD).long()


def batches(size: int, steps: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Random batches, as many as there are steps."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(columns[0]), (size,), generator=generator)
        yield tuple(column[chosen] for column in columns)


# Causal language models -------------------------------------------------------------------------------------------


def gpt2(trainee: Trainee) -> nn.Module:
    config = GPT2Config(vocab_size=BYTES, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=0)
    rate = 1e-3 * (100 if trainee.fault == "rate x 100" else 1)
    model = GPT2LMHeadModel(config)
    if trainee.fault == "a block frozen":
        model.transformer.h[1].mlp.requires_grad_(False)
    return fit(trainee, model, language_data(), learning_rate=rate, max_steps=100)


def llama(trainee: Trainee) -> nn.Module:
    """bfloat16 autocast, accumulated gradients, a cosine."""
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    options = {"bf16": True, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}
    return fit(trainee, LlamaForCausalLM(config), language_data(), per_device_train_batch_size=8, **options)


def qwen2(trainee: Trainee) -> nn.Module:
    """Gradient checkpointing, as for models that do not fit."""
    config = Qwen2Config(
        vocab_size=BYTES,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return fit(trainee, Qwen2ForCausalLM(config), language_data(), gradient_checkpointing=True)


def gemma2(trainee: Trainee) -> nn.Module:
    """Soft-capped logits, norms before and after, a plain loop without a clip."""
    config = Gemma2Config(
        vocab_size=BYTES,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=64,
        sliding_window=32,
        attn_implementation="eager",
    )
    model = Gemma2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, betas=(0.9, 0.95))
    monitor = trainee.watch(model, optimizer)
    model.train()
    for (tokens,) in batches(16, 50, token_windows(800, 64)):
        loss = model(input_ids=tokens, labels=tokens).loss
        if trainee.fault == "the sign turned":
            loss = -loss
        loss.backward()
        optimizer.step()
        if trainee.fault != "gradients are not cleared":
            optimizer.zero_grad()
        monitor.log(loss=loss, inputs=tokens, targets=tokens)
    return model


def mixtral(trainee: Trainee) -> nn.Module:
    """Experts of which each token takes two, with the loss that balances them."""
    config = MixtralConfig(
        vocab_size=BYTES,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
    )
    return fit(trainee, MixtralForCausalLM(config), language_data(), adam_beta2=0.95)


def mamba(trainee: Trainee) -> nn.Module:
    config = MambaConfig(
        vocab_size=BYTES, hidden_size=48, state_size=8, num_hidden_layers=2, expand=2, conv_kernel=4, use_cache=False
    )
    return fit(trainee, MambaForCausalLM(config), language_data(400, 32), max_steps=40, weight_decay=0.1)


# Encoders ---------------------------------------------------------------------------------------------------------


def bert(trainee: Trainee) -> nn.Module:
    """Masked language modelling by a plain loop: 15 % of the tokens, linear warm-up and decay, clipped at 1."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 6, (61 - step) / 55))
    monitor = trainee.watch(model, optimizer, scheduler=schedule, total_steps=60)
    model.train()
    for (tokens,) in batches(16, 60, token_windows(800, 64)):
        if trainee.fault == "the same batch at every step":
            torch.manual_seed(0)
            tokens = token_windows(16, 64)
        is_masked = torch.rand(tokens.shape) < 0.15
        inputs = tokens.masked_fill(is_masked, MASK)
        labels = tokens.masked_fill(~is_masked, -100)
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, inputs=inputs, targets=labels)
    return model


def _guess_data() -> tuple[Tensor, Tensor, Tensor]:
    """Lines of code, and by which letter they begin: of three kinds."""
    found = lines(10, 60)[:1500]
    kinds = [0 if line[0] < "e" else 1 if line[0] < "m" else 2 for line in found]
    return (*padded(found, 48), torch.tensor(kinds))


def roberta(trainee: Trainee) -> nn.Module:
    """Classification of padded lines, evaluated twice."""
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        pad_token_id=1,  # positions count from it on
        num_labels=3,
    )
    tokens, mask, kinds = _guess_data()
    tokens = tokens.masked_fill(mask == 0, 1)
    columns = {"input_ids": tokens, "attention_mask": mask, "labels": kinds}
    train = Dictionaries(**{name: column[:1200] for name, column in columns.items()})
    held = Dictionaries(**{name: column[1200:] for name, column in columns.items()})
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 50, "max_steps": 100, "learning_rate": 2e-3}
    if trainee.fault == "weight decay of 20":
        options["weight_decay"] = 20.0
    model = RobertaForSequenceClassification(config)
    if trainee.fault == "the optimizer has no head":
        body = torch.optim.AdamW(model.roberta.parameters(), lr=2e-3)
        return fit(trainee, model, train, held, optimizers=(body, None), **options)
    return fit(trainee, model, train, held, **options)


def distilbert(trainee: Trainee) -> nn.Module:
    """Question answering: where in the line the first call is. Fine-tuned with a frozen embedding."""
    config = DistilBertConfig(
        vocab_size=VOCABULARY, dim=64, n_layers=2, n_heads=4, hidden_dim=128, max_position_embeddings=64
    )
    found = [line for line in lines(10, 60) if "(" in line and ")" in line[line.index("(") :]][:1000]
    tokens, mask = padded(found, 64)
    starts = torch.tensor([min(63, len(line[: line.index("(")].encode()) + 1) for line in found])
    ends = torch.tensor([min(63, len(line[: line.index(")", line.index("("))].encode()) + 1) for line in found])
    model = DistilBertForQuestionAnswering(config)
    model.distilbert.embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    monitor = trainee.watch(model, optimizer)
    model.train()
    for tokens_, mask_, start, end in batches(16, 60, tokens, mask, starts, ends):
        loss = model(input_ids=tokens_, attention_mask=mask_, start_positions=start, end_positions=end).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.log(loss=loss, inputs=tokens_)
    return model


# From sequence to sequence ----------------------------------------------------------------------------------------


def t5(trainee: Trainee) -> nn.Module:
    """Upper-cases lines. Adafactor with a rate of its own, as T5 was trained."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        pad_token_id=PAD,
        eos_token_id=START,
        decoder_start_token_id=PAD,
    )
    found = lines(10, 40)[:1000]
    tokens, mask = padded(found, 32)
    labels = padded([line.upper() for line in found], 32)[0]
    labels = labels.masked_fill(labels == PAD, -100)
    data = Dictionaries(input_ids=tokens, attention_mask=mask, labels=labels)
    model = T5ForConditionalGeneration(config)
    return fit(trainee, model, data, optim="adafactor", learning_rate=3e-3, lr_scheduler_type="constant_with_warmup")


def bart(trainee: Trainee) -> nn.Module:
    """Restores masked lines; label smoothing, a cosine, a plain loop."""
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=START,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config)
    tokens, mask = padded(lines(10, 40)[:1000], 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, 50)
    monitor = trainee.watch(model, optimizer, scheduler=schedule, total_steps=50)
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    model.train()
    for whole, real in monitor.batches(list(batches(16, 50, tokens, mask))):
        noisy = whole.masked_fill((torch.rand(whole.shape) < 0.3) & (real == 1), MASK)
        labels = whole.masked_fill(real == 0, -100)
        logits = model(input_ids=noisy, attention_mask=real, labels=labels).logits
        loss = smoothed(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        monitor.log(loss=loss, inputs=noisy, targets=labels)
    return model


TRAININGS = (
    Training(
        "transformers/gpt2",
        gpt2,
        100,
        {"rate x 100": Fault(("lr-too-high",)), "a block frozen": Fault(("layer-frozen",), "transformer.h.1.mlp*")},
    ),
    Training("transformers/llama", llama, 50),
    Training("transformers/qwen2", qwen2, 50),
    Training(
        "transformers/gemma2",
        gemma2,
        50,
        {"gradients are not cleared": Fault(("zero-grad-missing",)), "the sign turned": Fault(("loss-sign",))},
    ),
    Training("transformers/mixtral", mixtral, 50),
    Training("transformers/mamba", mamba, 40),
    Training(
        "transformers/bert",
        bert,
        60,
        {
            "the same batch at every step": Fault(("batch-repeated",)),
        },
    ),
    Training(
        "transformers/roberta",
        roberta,
        100,
        {
            "the optimizer has no head": Fault(("optimizer-holds-other-parameters",), "classifier*"),
            "weight decay of 20": Fault(("weight-decay-too-high",)),
        },
    ),
    Training("transformers/distilbert", distilbert, 60),
    Training("transformers/t5", t5, 50),
    Training("transformers/bart", bart, 50),
)
