# ruff: noqa: T201
"""A small character GPT, written for one device: it knows nothing about parallelism.

python one_device_gpt.py
thinwire launch --plan ../plans/data_and_tensor.toml --nproc-per-node 4 one_device_gpt.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH, WIDTH, HEADS, LAYERS = 16, 128, 4, 2
TEXT = "the wire is thin and the gradients are wide, so what travels must be small. " * 6


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        # As many heads as there are columns for, so that the layers can be split by columns.
        q, k, v = (
            w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.words(x) + self.places)))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--save")
    parser.add_argument("--resume")
    args = parser.parse_args()

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    letters = sorted(set(TEXT))
    text = torch.tensor([letters.index(each) for each in TEXT])
    windows = text.unfold(0, LENGTH + 1, 3)
    data = TensorDataset(windows[:, :-1], windows[:, 1:])
    loader = DataLoader(data, batch_size=args.batch, shuffle=True)

    model = GPT(len(letters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * len(loader))
    if args.resume:
        state = torch.load(args.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    for epoch in range(args.epochs):
        model.train()
        for x, y in loader:
            loss = loss_of(model, x.to(device), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            losses = [loss_of(model, x.to(device), y.to(device)).item() for x, y in loader]
        print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f}", flush=True)
    if args.save:
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: each.state_dict() for name, each in parts.items()}, args.save)


if __name__ == "__main__":
    main()
