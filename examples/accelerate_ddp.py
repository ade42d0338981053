# ruff: noqa: T201
"""Hugging Face Accelerate: a hook on the model that `prepare` returns.

torchrun --nproc-per-node 2 examples/accelerate_ddp.py     # or: accelerate launch --num_processes 2 --cpu ...
"""

import hashlib

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire


def main(epochs=2):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), 64, shuffle=True)

    state, hook = thinwire.hooks.get("int8", net)  # before prepare: rules see the names of parameters
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    model.register_comm_hook(state, hook)

    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), labels)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"loss {loss.item():.4f}")
    bits = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    print(f"rank {accelerator.process_index} weights {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)
    accelerator.print(f"ratio {state.stats()['ratio']:.2f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
