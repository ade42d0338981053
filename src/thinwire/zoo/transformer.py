"""Transformers: equal blocks of attention and a two-layer perceptron, all of it matrix products.

Each block has 12 width**2 parameters in four matrices, and a few vectors with less than two thousandths of
that. The matrices are used at every position, so arithmetic per parameter grows with the sequence length.

- `gpt2` is the smallest network of Radford et al. (2019), "Language models are unsupervised multitask
  learners": 12 blocks of width 768, 1024 positions, 50 257 tokens. The head is the token embedding, used
  a second time, so its gradient is the sum of both uses and is sent once. The paper says 117 M; its authors
  corrected that to 124 M.
- `vit_b` is ViT-B/16 of Dosovitskiy et al. (2021), "An image is worth 16x16 words", on images of 224 pixels.

Weights are (out, in) as in `nn.Linear`; the released GPT-2 stores the transpose.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.zoo.layers import chain

DROPOUT = 0.1


class Attention(nn.Module):
    """Self-attention with `heads` heads; `causal` hides later positions."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [batch, time, 3, heads, width / heads]
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a perceptron four times as wide; each reads the normalized input and adds to it."""

    def __init__(self, width: int, heads: int, *, causal: bool, gelu: nn.GELU, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = chain(fc1=nn.Linear(width, 4 * width), gelu=gelu, fc2=nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT2(nn.Module):
    """Takes token numbers (batch, time), at most `positions` of them, and returns logits per position."""

    def __init__(
        self,
        vocabulary: int = 50_257,
        positions: int = 1024,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(
            *(
                Block(width, heads, causal=True, gelu=nn.GELU(approximate="tanh"), eps=1e-5)
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        _init(self)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


class ViT(nn.Module):
    """Takes images (batch, 3, 224, 224), cut into patches of `patch` pixels, and returns logits."""

    def __init__(self, patch: int = 16, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        patches = (224 // patch) ** 2
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, patches + 1, width))
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(
            *(Block(width, heads, causal=False, gelu=nn.GELU(), eps=1e-6) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)
        _init(self)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # [batch, patches, width]
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.norm(self.blocks(self.dropout(x + self.positions)))
        return self.head(x[:, 0])


def gpt2() -> GPT2:
    """GPT-2 small."""
    return GPT2()


def vit_b() -> ViT:
    """ViT-B/16."""
    return ViT()


def _init(net: nn.Module) -> None:
    """Draw matrices and embeddings from a normal of deviation 0.02; set biases of matrices to zero."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
