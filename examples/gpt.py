"""A small GPT over bytes, and its training. This file does not use checkpoints."""

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

BYTES = 256


class Block(nn.Module):
    """Attention and MLP, each applied to a normalised copy of the stream."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).flatten(2)))


class GPT(nn.Module):
    def __init__(self, *, dim: int, depth: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(BYTES, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last_of_branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if last_of_branch else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard(gpt: GPT, mesh: DeviceMesh) -> GPT:
    """Shard the model by FSDP2; on a 2-D mesh (replicas, shards) by HSDP."""
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(gpt, mesh=mesh)


class LitGPT(L.LightningModule):
    """Lightning module of the GPT. `replicate` is for ModelParallelStrategy: 1 is FSDP2, N > 1 HSDP with N replicas."""

    def __init__(self, *, model: dict, optim: dict, steps: int, seed: int, replicate: int = 1) -> None:
        super().__init__()
        self.model, self.optim, self.steps, self.seed, self.replicate = model, optim, steps, seed, replicate
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is not None:
            return
        torch.manual_seed(self.seed)  # every rank starts with the same weights
        self.gpt = self.build()
        torch.manual_seed(self.seed + 1 + self.global_rank)  # and drops out different activations
        if self.device_mesh is not None:  # ModelParallelStrategy
            shard(self.gpt, self.sharding_mesh(self.device_mesh))

    def build(self) -> GPT:
        return GPT(**self.model)

    def sharding_mesh(self, ranks: DeviceMesh) -> DeviceMesh:
        if self.replicate == 1:
            return ranks["data_parallel"]
        shape = (self.replicate, ranks.size() // self.replicate)
        return init_device_mesh(ranks.device_type, shape, mesh_dim_names=("replicate", "shard"))

    def training_step(self, windows: Tensor) -> Tensor:
        logits = self.gpt(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() > 1]
        vectors = [p for p in trained if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.optim["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.optim["lr"], betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_then_cosine(step, self.optim["warmup"], self.steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warmup_then_cosine(step: int, warmup: int, steps: int) -> float:
    """Factor of the learning rate. Its length is a setting, so a run can resume with more steps."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
