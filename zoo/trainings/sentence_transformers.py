"""sentence-transformers: both halves of a line, told from those of others in the batch."""

from __future__ import annotations

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from torch import nn
from transformers import BertConfig, BertModel

from zoo.data import lines
from zoo.tokens import make_tokenizer
from zoo.trainee import Trainee
from zoo.training import Training


def ranking(trainee: Trainee) -> nn.Module:
    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
    )
    home = str(trainee.directory / "bert")
    BertModel(config).save_pretrained(home)
    tokenizer.save_pretrained(home)
    words = Transformer(home, max_seq_length=48)
    model = SentenceTransformer(modules=[words, Pooling(config.hidden_size)], device="cpu")
    found = lines(20, 60)[:1000]
    data = Dataset.from_dict({"anchor": found, "positive": [line.lower().replace(" ", "") for line in found]})
    arguments = SentenceTransformerTrainingArguments(
        str(trainee.directory / "out"),
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        max_steps=60,
        per_device_train_batch_size=32,
        learning_rate=5e-4,
        warmup_steps=6,
    )
    loss = MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(
        model, arguments, train_dataset=data, loss=loss, callbacks=[trainee.callback("transformers")]
    ).train()
    return model


TRAININGS = (Training("sentence-transformers/ranking", ranking, 60),)
