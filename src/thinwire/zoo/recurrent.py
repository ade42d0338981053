"""Recurrent networks for speech, translation and language.

Nearly all parameters are tall matrices that are used at every time step. For scales per column they are the
opposite of a convolution. One LSTM layer has four gates; their weights are stacked into one matrix of
4 x cell rows, as in every framework, so one column has thousands of elements and its scales cost nothing.

`Projected` is the LSTM with a recurrent projection of Sak, Senior and Beaufays (2014): the cell is wide, but
its output, to itself and to the next layer, is projected to fewer numbers.

- `an4_lstm` is the acoustic model of CNTK's AN4 example that QSGD (Alistarh et al. 2017) counts as 13 M:
  three projected layers with peepholes, 363 inputs (33 features x 11 frames) and 132 classes.
- `biglstm` is the two-layer LSTM-8192-1024 of Jozefowicz et al. (2016), "Exploring the limits of language
  modeling", 1.8 billion parameters on the One Billion Word vocabulary; Pal et al. (2019) call it BigLSTM.
- `gnmt` is the four-layer form of Google's translator (Wu et al. 2016) that became the MLPerf benchmark: one
  vocabulary and one embedding for both languages, attention computed by the first decoder layer.

Sequences are (batch, time, ...) throughout.
"""

import torch
from torch import Tensor, nn

from thinwire.zoo.layers import chain


class Projected(nn.Module):
    """An LSTM layer of `cell` units whose output is projected to `outputs` numbers.

    The four gates are stacked in the order input, forget, output, candidate, with one bias. With `peepholes`
    the first three also read the cell state, each unit its own.
    """

    def __init__(self, inputs: int, cell: int, outputs: int, *, peepholes: bool) -> None:
        super().__init__()
        self.cell = cell
        self.input = nn.Linear(inputs, 4 * cell)
        self.recurrent = nn.Linear(outputs, 4 * cell, bias=False)
        self.projection = nn.Linear(cell, outputs, bias=False)
        self.peepholes = (
            nn.ParameterDict({gate: torch.zeros(cell) for gate in ("input", "forget", "output")})
            if peepholes
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        gate_inputs = self.input(x)  # [batch, time, 4 * cell]
        output = x.new_zeros(x.shape[0], self.projection.out_features)
        state = x.new_zeros(x.shape[0], self.cell)
        outputs = []
        for step in gate_inputs.unbind(dim=1):
            output, state = self._advance(step + self.recurrent(output), state)
            outputs.append(output)
        return torch.stack(outputs, dim=1)

    def _advance(self, gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next output and cell state, from the summed inputs of the gates."""
        input_gate, forget_gate, output_gate, candidate = gates.chunk(4, dim=1)
        if self.peepholes is not None:
            input_gate = input_gate + self.peepholes["input"] * state
            forget_gate = forget_gate + self.peepholes["forget"] * state
        state = forget_gate.sigmoid() * state + input_gate.sigmoid() * candidate.tanh()
        if self.peepholes is not None:
            output_gate = output_gate + self.peepholes["output"] * state
        return self.projection(output_gate.sigmoid() * state.tanh()), state


class BigLSTM(nn.Module):
    """Two projected layers between a word embedding and a full softmax. Takes word numbers (batch, time)."""

    def __init__(self, vocabulary: int = 793_470, width: int = 1024, cell: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Projected(width, cell, width, peepholes=False) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.softmax = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        x = self.dropout(self.embedding(words))
        for layer in self.layers:
            x = self.dropout(layer(x))
        return self.softmax(x)


class Attention(nn.Module):
    """Additive attention (Bahdanau et al. 2015) with a normalized energy vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.energy = nn.Parameter(torch.empty(width))
        self.gain = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, query: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """Return for each query (batch, target, width) a mean of the memory (batch, source, width)."""
        sums = self.query(query).unsqueeze(2) + self.key(memory).unsqueeze(1) + self.bias
        scores = sums.tanh() @ (self.gain * self.energy / self.energy.norm())  # [batch, target, source]
        scores = scores.masked_fill(padding.unsqueeze(1), torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1) @ memory


class GNMT(nn.Module):
    """Encoder and decoder of four LSTM layers each.

    Takes token numbers, the source (batch, time) and the shifted target (batch, time), and returns the logits
    (batch, target time, vocabulary). Token 0 pads a source; attention ignores it.
    """

    PADDING = 0
    LAYERS = 4

    def __init__(self, vocabulary: int = 32_320, width: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=self.PADDING)
        self.dropout = nn.Dropout(0.2)
        self.encoder = nn.ModuleList(
            (
                nn.LSTM(width, width, batch_first=True, bidirectional=True),
                nn.LSTM(2 * width, width, batch_first=True),
                *(nn.LSTM(width, width, batch_first=True) for _ in range(self.LAYERS - 2)),
            )
        )
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(
            (
                nn.LSTM(width, width, batch_first=True),
                *(nn.LSTM(2 * width, width, batch_first=True) for _ in range(self.LAYERS - 1)),
            )
        )
        self.classifier = nn.Linear(width, vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
        nn.init.constant_(self.attention.gain, width**-0.5)
        nn.init.zeros_(self.attention.bias)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self._encode(source)
        x, _ = self.decoder[0](self.dropout(self.embedding(target)))
        context = self.attention(x, memory, source == self.PADDING)
        for index, layer in enumerate(self.decoder[1:]):
            y, _ = layer(torch.cat((self.dropout(x), context), dim=-1))
            x = y if index == 0 else x + y
        return self.classifier(x)

    def _encode(self, source: Tensor) -> Tensor:
        x = self.embedding(source)
        for index, layer in enumerate(self.encoder):
            y, _ = layer(self.dropout(x))
            x = y if index < 2 else x + y
        return x


def an4_lstm() -> nn.Sequential:
    """The AN4 acoustic model. Takes frames (batch, time, 363) and returns (batch, time, 132)."""
    return chain(
        lstm1=Projected(363, 1024, 512, peepholes=True),
        lstm2=Projected(512, 1024, 512, peepholes=True),
        lstm3=Projected(512, 1024, 512, peepholes=True),
        fc=nn.Linear(512, 132),
    )


def biglstm() -> BigLSTM:
    """BigLSTM with the One Billion Word vocabulary."""
    return BigLSTM()


def gnmt() -> GNMT:
    """GNMT with the vocabulary of MLPerf, 32 320 tokens."""
    return GNMT()
