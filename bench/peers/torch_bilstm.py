"""Peer: BiLSTM taggers (VPPS section IV) in PyTorch, by nn.LSTM over packed sequences or by a loop over time steps.

    pip install torch

`packed` is what most PyTorch users run. `loop` takes both directions in one batched product a step. Rare words are spelled by
a BiLSTM over their letters, all of a batch at once. Inside the clock: packing from the raw arrays, look-up, forward, autograd,
SGD.
"""

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from bench.peers.levels import time_major
from bench.peers.torch_peer import Autograd, load_lstm, lstm_state, of_lstm

DIRECTIONS = {"forward": "_l0", "backward": "_l0_reverse"}


def both_ways(lengths):
    """Concatenated sequences in time-major order, forward and reversed: rows (2, N), and what `time_major` returns."""
    index, sizes, order = time_major(lengths)
    lengths = np.asarray(lengths)
    mirror = np.repeat(2 * (np.cumsum(lengths) - lengths) + lengths - 1, lengths) - np.arange(len(index))
    return np.stack([index, mirror[index]]), sizes, order


class BiLSTM:
    """One BiLSTM layer. `values`: ours, `forward.w` and so on; `weights`: the tensors to train, as `kind` needs them."""

    def __init__(self, values, kind):
        w = values["forward.w"]
        self.hidden, self.kind = len(values["forward.u"]), kind
        if kind == "loop":
            self.weights = {k: v.clone().requires_grad_() for k, v in values.items()}
            return
        self.lstm = torch.nn.LSTM(len(w), self.hidden, bidirectional=True, device=w.device)
        for direction, suffix in DIRECTIONS.items():
            load_lstm(self.lstm, {k: values[f"{direction}.{k}"] for k in "wub"}, suffix)
        self.weights = {k: w for k, w in self.lstm.named_parameters() if w.requires_grad}

    def values(self):
        """The parameters as ours."""
        if self.kind == "loop":
            return self.weights
        return {f"{d}.{k}": v for d, suffix in DIRECTIONS.items() for k, v in of_lstm(self.lstm, suffix).items()}

    def __call__(self, x, lengths, ends=False):
        """Returns h of all rows of `x`, concatenated sequences: (rows, 2H); with `ends` one row per sequence."""
        index, sizes, order = both_ways(lengths)
        indices, order = torch.from_numpy(index).to(x.device), torch.from_numpy(order).to(x.device)
        h, last = (self._packed if self.kind == "packed" else self._loop)(x, indices, sizes)
        return _put_back(torch.cat([last[0], last[1]], 1), order) if ends else h

    def _packed(self, x, indices, sizes):
        """h of all rows, and of the last of each sequence in both directions."""
        out, (last, _) = self.lstm(PackedSequence(x.index_select(0, indices[0]), torch.from_numpy(sizes)))
        return _put_back(out.data, indices[0]), last

    def _loop(self, x, indices, sizes):
        """As `_packed`, by a loop over time steps."""
        w, u, b = (torch.stack([self.weights[f"{d}.{k}"] for d in DIRECTIONS]) for k in "wub")
        x, sizes = x.index_select(0, indices.view(-1)).view(2, -1, x.shape[1]), sizes.tolist()
        z = torch.baddbmm(b[:, None], x, w).split(sizes, 1)
        h = c = x.new_zeros(2, sizes[0], self.hidden)
        rows, ended = [], []
        for n, zt in zip(sizes, z, strict=True):
            if n < h.shape[1]:
                ended.append(h[:, n:])
                h, c = h[:, :n], c[:, :n]
            h, c = lstm_state(torch.baddbmm(zt, h, u), c)
            rows.append(h)
        rows, last = torch.cat(rows, 1), torch.cat([h, *ended[::-1]], 1)
        return torch.cat([_put_back(rows[0], indices[0]), _put_back(rows[1], indices[1])], 1), last


def _put_back(x, order):
    """Undoes the permutation `order` of the rows."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return x.index_select(0, back)


class TorchBiLSTM(Autograd):
    """One tagger, trained. `kind` is "packed" or "loop"."""

    def __init__(self, cell, params, threads=2, kind="packed", device="cpu"):
        super().__init__(cell, params, threads, device)
        p = {k: v.detach() for k, v in self._p.items()}
        layer = lambda prefix: BiLSTM({k[len(prefix) :]: p.pop(k) for k in list(p) if k.startswith(prefix)}, kind)  # noqa: E731
        self._layers = {"spell.": layer("spell.")} if cell == "char_bilstm" else {}
        self._layers[""] = BiLSTM({k: p.pop(k) for k in list(p) if "." in k}, kind)
        self._p = {k: v if k == "embed" else v.requires_grad_() for k, v in p.items()}
        of_layers = [w for bilstm in self._layers.values() for w in bilstm.weights.values()]
        self._weights = [*(v for k, v in self._p.items() if k != "embed"), *of_layers]

    def _ours(self):
        return self._p | {prefix + k: v for prefix, layer in self._layers.items() for k, v in layer.values().items()}

    def schedule(self, batch):
        """Packing."""
        return both_ways([len(g["words"]) for g in batch]), both_ways([len(s) for s in self._spellings(batch)] or [1])

    def _spellings(self, batch):
        return [s for g in batch for s in g["spellings"]] if "spell." in self._layers else []

    def _net(self, batch):
        word, labels = (np.concatenate([g[k] for g in batch]) for k in ("words", "labels"))
        spellings, lengths = self._spellings(batch), [len(g["words"]) for g in batch]
        forward = lambda x: self._states(self._spelled(x, word, spellings) if spellings else x, lengths)  # noqa: E731
        return word[word >= 0], forward, labels

    def _states(self, x, lengths):
        return torch.addmm(self._p["mlp_b"], self._layers[""](x, lengths), self._p["mlp_w"]).tanh()

    def _spelled(self, rows, word, spellings):
        """The vectors of all words: `rows` for frequent words, and the vectors of their spellings for the others (-1)."""
        letters = self._p["characters"].index_select(0, self._send(np.concatenate(spellings)))
        spelled = self._layers["spell."](letters, [len(s) for s in spellings], ends=True)
        place = np.argsort(np.argsort(word < 0, kind="stable"))  # frequent words lie before rare ones
        return torch.cat([rows, spelled]).index_select(0, self._send(place))
