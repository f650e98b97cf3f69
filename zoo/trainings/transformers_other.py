"""Hugging Face transformers on images, sound and series; every model from a small configuration."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    DetrConfig,
    DetrForObjectDetection,
    PatchTSTConfig,
    PatchTSTForPrediction,
    ResNetConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    TimeSeriesTransformerConfig,
    TimeSeriesTransformerForPrediction,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from zoo.data import Dictionaries, digits
from zoo.trainee import Trainee
from zoo.training import Fault, Training
from zoo.trainings.transformers_text import batches, fit


def vit(trainee: Trainee) -> nn.Module:
    images, classes = digits(16)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=16,
        patch_size=4,
        num_channels=1,
        num_labels=10,
        initializer_range=1.0 if trainee.fault == "weights of deviation 1" else 0.02,
    )
    if trainee.fault == "images not normalised":
        images = 100 + 60 * images
    data = Dictionaries(pixel_values=images, labels=classes)
    return fit(trainee, ViTForImageClassification(config), data, max_steps=60, label_smoothing_factor=0.1)


def segformer(trainee: Trainee) -> nn.Module:
    """Which pixels of a digit are ink."""
    images, _ = digits(32, 3)
    config = SegformerConfig(
        num_encoder_blocks=4,
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 48, 64],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=32,
        num_labels=2,
    )
    ink = (images[:, 0] > 0).long()
    model = SegformerForSemanticSegmentation(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = trainee.watch(model, optimizer)
    model.train()
    for pixels, labels in batches(8, 50, images, ink):
        loss = model(pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=pixels, targets=labels)
    return model


def detr(trainee: Trainee) -> nn.Module:
    """Finds two digits on a canvas; matched to queries, two rates, clipped at 0.1, as DETR is trained."""
    images, classes = digits(16, 3)
    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=8,
        num_labels=10,
        dropout=0.1,
    )
    model = DetrForObjectDetection(config)
    slow = [one for name, one in model.named_parameters() if "backbone" in name and one.requires_grad]
    rest = [one for name, one in model.named_parameters() if "backbone" not in name]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": slow, "lr": 1e-4}], lr=1e-3, weight_decay=1e-4)
    monitor = trainee.watch(model, optimizer)
    model.train()
    for pixels, labels in batches(16, 50, images, classes):
        canvas, targets = _scenes(pixels, labels)
        out = model(pixel_values=canvas, labels=targets)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        monitor.log(loss=out.loss, inputs=canvas)
    return model


def _scenes(images: Tensor, classes: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Two digits on each canvas of 48 x 48, one in the left half and one in the right."""
    count = len(images) // 2
    canvas = torch.full((count, 3, 48, 48), float(images.min()))
    targets = []
    for place in range(count):
        boxes = []
        for side in range(2):
            top, left = (int(torch.randint(0, most, ())) for most in (33, 9))
            left += 24 * side
            canvas[place, :, top : top + 16, left : left + 16] = images[2 * place + side]
            boxes.append([(left + 8) / 48, (top + 8) / 48, 1 / 3, 1 / 3])
        found = {"class_labels": classes[2 * place : 2 * place + 2], "boxes": torch.tensor(boxes)}
        targets.append(found)
    return canvas, targets


def clip(trainee: Trainee) -> nn.Module:
    """Images of digits against their names, contrasted within the batch."""
    images, classes = digits(16, 3)
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rows = [[1, *(ord(letter) - 92 for letter in name), 2] for name in names]
    tokens = torch.tensor([row + [2] * (8 - len(row)) for row in rows])
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**small, "vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={**small, "image_size": 16, "patch_size": 4},
        projection_dim=32,
    )
    model = CLIPModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-6)
    monitor = trainee.watch(model, optimizer)
    by_class = [(classes == one).nonzero()[:, 0] for one in range(10)]
    model.train()
    for _ in range(50):  # each digit once in a batch: else a right pair would count as wrong
        chosen = torch.stack([places[torch.randint(len(places), ())] for places in by_class])
        loss = model(input_ids=tokens, pixel_values=images[chosen], return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=images[chosen])
    return model


def _tones(count: int) -> tuple[Tensor, Tensor]:
    """Melodies of four tones out of five, with noise: the sound [count, 1600] and the tones, 1 to 5."""
    generator = torch.Generator().manual_seed(0)
    notes = torch.randint(1, 6, (count, 4), generator=generator)
    time = torch.arange(400) / 1600
    sound = torch.sin(2 * math.pi * (60.0 * notes)[..., None] * time).flatten(1)
    return sound + 0.1 * torch.randn(sound.shape, generator=generator), notes


def wav2vec2(trainee: Trainee) -> nn.Module:
    """Speech recognition by CTC, from raw sound."""
    config = Wav2Vec2Config(
        vocab_size=6,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 8, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        mask_time_prob=0.0,
        layerdrop=0.0,
        ctc_loss_reduction="mean",
        pad_token_id=0,
    )
    sound, notes = _tones(800)
    model = Wav2Vec2ForCTC(config)
    return fit(trainee, model, Dictionaries(input_values=sound, labels=notes), max_steps=60, learning_rate=5e-4)


def whisper(trainee: Trainee) -> nn.Module:
    """Transcribes the same melodies from their spectrograms."""
    sound, notes = _tones(800)
    windows = torch.stft(sound, 126, hop_length=16, return_complex=True, window=torch.hann_window(126)).abs()
    features = (windows + 1e-3).log()[:, :, :100]
    features = (features - features.mean()) / features.std()
    config = WhisperConfig(
        vocab_size=10,
        num_mel_bins=64,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=7,
        eos_token_id=8,
        decoder_start_token_id=7,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    labels = torch.cat([notes, torch.full((len(notes), 1), 8)], dim=1)
    model = WhisperForConditionalGeneration(config)
    return fit(trainee, model, Dictionaries(input_features=features, labels=labels), max_steps=60)


def time_series(trainee: Trainee) -> nn.Module:
    """Forecasts noisy waves; the loss is a negative log-likelihood and may go below zero."""
    config = TimeSeriesTransformerConfig(
        prediction_length=12,
        context_length=24,
        lags_sequence=[1, 2, 3],
        num_time_features=1,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )
    model = TimeSeriesTransformerForPrediction(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = trainee.watch(model, optimizer)
    past, future = 24 + 3, 12
    time = torch.arange(past + future, dtype=torch.float32)
    model.train()
    for _ in range(60):
        phase, pace = torch.rand(32, 1) * 6.3, 0.3 + torch.rand(32, 1)
        values = torch.sin(pace * time + phase) + 0.05 * torch.randn(32, past + future)
        ages = (time / len(time)).expand(32, -1)[..., None]
        loss = model(
            past_values=values[:, :past],
            past_time_features=ages[:, :past],
            past_observed_mask=torch.ones(32, past),
            future_values=values[:, past:],
            future_time_features=ages[:, past:],
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.log(loss=loss, inputs=values[:, :past], targets=values[:, past:])
    return model


def patches(trainee: Trainee) -> nn.Module:
    """Forecasts by PatchTST, whose positions are a fixed table kept as a parameter."""
    config = PatchTSTConfig(
        num_input_channels=2,
        context_length=32,
        prediction_length=8,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=64,
    )
    model = PatchTSTForPrediction(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = trainee.watch(model, optimizer)
    time = torch.arange(3000) * 0.1
    waves = torch.stack([torch.sin(time), torch.cos(1.7 * time)], 1) + 0.1 * torch.randn(3000, 2)
    windows = waves.unfold(0, 40, 1).transpose(1, 2)
    model.train()
    for (values,) in batches(32, 60, windows):
        loss = model(past_values=values[:, :32], future_values=values[:, 32:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=values[:, :32], targets=values[:, 32:])
    return model


TRAININGS = (
    Training(
        "transformers/vit",
        vit,
        60,
        {
            "images not normalised": Fault(("input-scale",)),
            "weights of deviation 1": Fault(("init-too-large",)),
        },
    ),
    Training("transformers/segformer", segformer, 50),
    Training("transformers/detr", detr, 50),
    Training("transformers/clip", clip, 50),
    Training("transformers/wav2vec2", wav2vec2, 60),
    Training("transformers/whisper", whisper, 60),
    Training("transformers/time-series", time_series, 60),
    Training("transformers/patchtst", patches, 60),
)
