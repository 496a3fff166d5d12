"""A character GPT that draws its batches by random offsets and accumulates gradients, in plain PyTorch."""

import math

import torch
import torch.nn.functional as F
from torch import nn

batch_size, block_size, accumulation = 6, 24, 2
n_layer, n_head, n_embd = 2, 4, 32
max_iters, eval_interval, eval_iters, log_interval = 12, 6, 3, 3
learning_rate, min_lr, warmup_iters, grad_clip = 1e-2, 1e-3, 3, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        rows, length, _ = x.shape
        parts = self.attn(self.ln_1(x)).view(rows, length, 3, n_head, n_embd // n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(rows, length, n_embd))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits[:, -1:], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


text = "the quick brown fox jumps over the lazy dog; " * 60
chars = sorted(set(text))
data = torch.tensor([chars.index(char) for char in text])
splits = {"train": data[: int(0.9 * len(data))], "val": data[int(0.9 * len(data)) :]}


def get_batch(split):
    source = splits[split]
    ix = torch.randint(len(source) - block_size, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


torch.manual_seed(1337)
device = torch.accelerator.current_accelerator() or torch.device("cpu")
model = GPT(len(chars)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

for it in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {it} train loss {losses['train']:.6f} val loss {losses['val']:.6f}")
    for _ in range(accumulation):
        x, y = get_batch("train")
        _, loss = model(x, y)
        (loss / accumulation).backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if it % log_interval == 0:
        print(f"iter {it} loss {loss.item():.6f}")
