"""diffusers: noise predicted by a U-Net and by a transformer, and a variational autoencoder, on digits."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, DDPMScheduler, DiTTransformer2DModel, UNet2DModel
from diffusers.training_utils import EMAModel
from torch import nn
from torch.nn.functional import mse_loss
from transformers import get_cosine_schedule_with_warmup

from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Training
from zoo.trainings.transformers_text import batches


def ddpm(trainee: Trainee) -> nn.Module:
    """Warm-up and cosine, clipped at 1, with a moving average of the weights."""
    images, _ = digits(16)
    model = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    scheduler = DDPMScheduler(num_train_timesteps=200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, 60)
    average = EMAModel(model.parameters(), decay=0.95)
    monitor = trainee.watch(model, optimizer, scheduler=schedule, total_steps=60)
    model.train()
    for (clean,) in batches(16, 60, images):
        noise, times = torch.randn_like(clean), torch.randint(0, 200, (len(clean),))
        noisy = scheduler.add_noise(clean, noise, times)
        loss = mse_loss(model(noisy, times, return_dict=False)[0], noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        monitor.log(loss=loss, inputs=noisy, targets=noise)
    return model


def dit(trainee: Trainee) -> nn.Module:
    """A diffusion transformer: norms that start at zero, classes as conditions."""
    images, classes = digits(16)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=1,
        out_channels=1,
        num_layers=3,
        norm_num_groups=8,
        sample_size=16,
        patch_size=4,
        num_embeds_ada_norm=200,
    )
    scheduler = DDPMScheduler(num_train_timesteps=200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    monitor = trainee.watch(model, optimizer)
    model.train()
    for clean, kinds in batches(32, 60, images, classes):
        noise, times = torch.randn_like(clean), torch.randint(0, 200, (len(clean),))
        noisy = scheduler.add_noise(clean, noise, times)
        loss = mse_loss(model(noisy, timestep=times, class_labels=kinds).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, inputs=noisy, targets=noise)
    return model


def vae(trainee: Trainee) -> nn.Module:
    """The loss is a sum over pixels by design, and the weight of its second part grows."""
    images, _ = digits(16)
    model = AutoencoderKL(
        in_channels=1,
        out_channels=1,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(16, 32),
        latent_channels=4,
        norm_num_groups=8,
        sample_size=16,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = trainee.watch(model, optimizer)
    model.train()
    for step, (clean,) in enumerate(batches(16, 60, images)):
        posterior = model.encode(clean).latent_dist
        restored = model.decode(posterior.sample()).sample
        error = mse_loss(restored, clean, reduction="sum") / len(clean)
        divergence = posterior.kl().mean()
        loss = error + min(1.0, step / 40) * divergence
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        monitor.log(loss=loss, kl=divergence, inputs=clean)
    return model


TRAININGS = (
    Training("diffusers/ddpm-unet", ddpm, 60),
    Training("diffusers/dit", dit, 60),
    Training("diffusers/vae", vae, 60),
)
