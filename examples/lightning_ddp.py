# ruff: noqa: T201
"""PyTorch Lightning: attach when training starts; two processes, which Lightning starts by itself.

    python examples/lightning_ddp.py

On GPUs, Lightning also takes `DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)` with
`state, hook = thinwire.hooks.get("int8")`. On CPUs it ignores them; the callback works on both.
"""

import hashlib

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire


class Thinwire(lightning.Callback):
    """Attaches to the DDP model that Lightning made."""

    def __init__(self, codec):
        self.codec, self.handle = codec, None

    def on_train_start(self, trainer, pl_module):
        del pl_module
        self.handle = thinwire.attach(trainer.strategy.model, self.codec)

    def on_train_end(self, trainer, pl_module):
        bits = b"".join(each.detach().cpu().numpy().tobytes() for each in pl_module.parameters())
        print(f"rank {trainer.global_rank} weights {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)
        if trainer.is_global_zero:
            print(f"ratio {self.handle.stats()['ratio']:.2f}", flush=True)


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch):
        features, labels = batch
        return nn.functional.cross_entropy(self.net(features), labels)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        del batch
        if batch_idx == 0 and self.trainer.is_global_zero:
            print(f"loss {outputs['loss'].item():.4f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)


def main():
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
        devices=2,
        strategy=DDPStrategy(),
        callbacks=[Thinwire("int8")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(TensorDataset(x, y), 64, shuffle=True))


if __name__ == "__main__":
    main()
