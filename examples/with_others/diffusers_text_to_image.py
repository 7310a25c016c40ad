"""The loop of diffusers' train_text_to_image.py: a UNet learns to predict noise from texts, with Accelerate.

The line that is added is `attach(accelerator, ...)`; `accelerator.save_state` stands where it does in their script, and
`resume_or_init` is what they have under `--resume_from_checkpoint`. The UNet is a tiny one from a config, and latents
and text embeddings are made up; in theirs the VAE and the text encoder make them.

    pip install diffusers
    python examples/with_others/diffusers_text_to_image.py out          # stop it however you like, and run it again
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from torch.utils.data import DataLoader, TensorDataset

from dcp_plugin.accelerate import attach

out_dir, max_train_steps, checkpointing_steps = sys.argv[1], 10, 2
accelerator = Accelerator(cpu=True)
checkpoints = attach(accelerator, async_save=True)  # added
set_seed(1337)

unet = UNet2DConditionModel(
    sample_size=8,
    block_out_channels=(8, 16),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    layers_per_block=1,
    cross_attention_dim=16,
    attention_head_dim=4,
    norm_num_groups=4,
)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=max_train_steps)
pairs = TensorDataset(torch.randn(40, 4, 8, 8), torch.randn(40, 5, 16))  # latents, text embeddings
loader = DataLoader(pairs, batch_size=4, shuffle=True)
unet, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)

accelerator.print(checkpoints.resume_or_init(out_dir))  # added
global_step = lr_scheduler.scheduler.last_epoch
batches = accelerator.skip_first_batches(loader, global_step % len(loader))
while global_step < max_train_steps:
    for latents, text in batches:
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),))
        noisy = noise_scheduler.add_noise(latents, noise, timesteps)
        loss = torch.nn.functional.mse_loss(unet(noisy, timesteps, text).sample, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        global_step += 1
        accelerator.print(f"step {global_step}: loss {loss.item()!r}")
        if global_step % checkpointing_steps == 0:
            accelerator.save_state(f"{out_dir}/checkpoint-{global_step}")
        if global_step == max_train_steps:
            break
    batches = loader
accelerator.end_training()
