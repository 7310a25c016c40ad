"""A plain loop in the structure of nanoGPT's train.py: out_dir, init_from="resume", eval_interval, a best_val_loss.

Its `if init_from == "resume": checkpoint = torch.load(...)` and the `load_state_dict` after it are one line here,
`resume_or_init`, and its `torch.save` is `checkpoints.save`. Both marked with "added". In nanoGPT itself `model` is its
`GPT(gptconf)`, not the small one below.

    python examples/with_others/nanogpt.py out          # stop it however you like, and run it again
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dcp_plugin

out_dir, init_from = sys.argv[1], "resume"
eval_interval, eval_iters, max_iters = 2, 2, 10
batch_size, block_size, vocab_size, n_embd, n_head, n_layer, dropout = 8, 32, 256, 32, 2, 2, 0.1


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        block = nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, dropout, batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(block, n_layer, enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied, as in nanoGPT

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        x = self.h(self.wte(idx) + self.wpe.weight[: idx.shape[1]], mask=causal, is_causal=True)
        return cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def get_batch() -> tuple[Tensor, Tensor]:
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size + 1] for i in ix]).long()
    return x[:, :-1], x[:, 1:]


@torch.no_grad()
def estimate_loss() -> float:
    model.eval()
    losses = [model(*get_batch()).item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / eval_iters


torch.manual_seed(1337)
data = torch.frombuffer(bytearray(Path(torch.optim.__file__).with_name("adamw.py").read_bytes()), dtype=torch.uint8)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
numbers = {"iter_num": 0, "best_val_loss": 1e9, "rng": torch.get_rng_state()}

checkpoints = dcp_plugin.Checkpointer(async_save=True)
state = {"model": model, "optimizer": optimizer, "numbers": numbers}
resume = "auto" if init_from == "resume" else "never"
print(dcp_plugin.resume_or_init(state, out_dir, resume=resume, checkpointer=checkpoints))  # added
torch.set_rng_state(numbers["rng"])

while True:
    iter_num = numbers["iter_num"]
    if iter_num % eval_interval == 0 and not Path(out_dir, f"ckpt-{iter_num}").exists():
        numbers["best_val_loss"] = min(estimate_loss(), numbers["best_val_loss"])
        numbers["rng"] = torch.get_rng_state()
        checkpoints.save(state, f"{out_dir}/ckpt-{iter_num}", step=iter_num)  # added
    if iter_num == max_iters:
        break
    loss = model(*get_batch())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item()!r}")
    numbers["iter_num"] += 1
checkpoints.close()
