"""Peer: DyNet itself, with autobatching (Neubig, Goldberg, Dyer, 2017).

    pip install dynet38 'numpy<1.25'      # Python 3.8, in an environment of its own
    python -m bench run --python dynet=/path/to/that/bin/python

Uses the wheel's CPU back end, which always runs one thread. Timed: the declaration of every sample's graph, autobatching,
forward, backward, sparse SGD. Weights are stored transposed, because DyNet multiplies column vectors. This file must run under
Python 3.8.
"""

import dynet_config

dynet_config.set(mem=2048, autobatch=1, random_seed=1)

import dynet as dy  # noqa: E402  (it reads its settings when imported)
import numpy as np  # noqa: E402


class DynetAutobatch:
    """One model; each sample declares its own graph."""

    def __init__(self, cell, params, threads=2):
        self._declare = getattr(self, "_" + cell)
        self._model = dy.ParameterCollection()
        self._tables = {k: self._model.lookup_parameters_from_numpy(params[k]) for k in ("embed", "characters") if k in params}
        self._embed = self._tables["embed"]
        self._p = {k: self._model.parameters_from_numpy(v.T) for k, v in params.items() if k not in self._tables}
        self._trainer = dy.SimpleSGDTrainer(self._model)
        self._trainer.set_clip_threshold(0)
        self._width = params["out_w"].shape[0]

    def params(self):
        return dict({k: p.as_array().T for k, p in self._p.items()}, **{k: t.as_array() for k, t in self._tables.items()})

    def schedule(self, batch):
        """Constructs the graph of every sample. DyNet batches them within forward."""
        dy.renew_cg()
        losses = [loss for sample in batch for loss in self._declare(sample)]
        return dy.esum(losses) / len(losses)

    def step(self, batch, lr=0.05):
        loss = self.schedule(batch)
        value = loss.value()
        loss.backward()
        self._trainer.learning_rate = lr
        self._trainer.update()
        return value

    def _loss(self, h, label):
        return dy.pickneglogsoftmax(dy.affine_transform([self._p["out_b"], self._p["out_w"], h]), int(label))

    def _tree_lstm(self, tree):
        p, n = self._p, self._width
        states = []
        for left, right, word in np.stack([tree["left"], tree["right"], tree["word"]], 1).tolist():
            if left < 0:
                iou = dy.affine_transform([p["b_iou"], p["w_iou"], self._embed[word]])
                c = dy.cmult(dy.logistic(iou[:n]), dy.tanh(iou[2 * n :]))
            else:
                (h1, c1), (h2, c2) = states[left], states[right]
                iou = dy.affine_transform([p["b_iou"], p["u_iou"], h1 + h2])
                f1 = dy.logistic(dy.affine_transform([p["b_f"], p["u_f"], h1]))
                f2 = dy.logistic(dy.affine_transform([p["b_f"], p["u_f"], h2]))
                c = dy.cmult(dy.logistic(iou[:n]), dy.tanh(iou[2 * n :])) + dy.cmult(f1, c1) + dy.cmult(f2, c2)
            states.append((dy.cmult(dy.logistic(iou[n : 2 * n]), dy.tanh(c)), c))
        return [self._loss(states[-1][0], tree["label"])]

    def _tree_fc(self, tree):
        states = []
        for left, right, word in np.stack([tree["left"], tree["right"], tree["word"]], 1).tolist():
            if left < 0:
                states.append(self._embed[word])
            else:
                kids = dy.concatenate([states[left], states[right]])
                states.append(dy.tanh(dy.affine_transform([self._p["b"], self._p["u"], kids])))
        return [self._loss(states[-1], tree["label"])]

    def _lstm(self, chain):
        states = self._chain([self._embed[w] for w in chain["words"].tolist()])
        return [self._loss(h, label) for h, label in zip(states, chain["labels"].tolist())]  # noqa: B905  (Python 3.8)

    def _chain(self, inputs, prefix="", n=None):
        """The states of an LSTM, whose parameters' names begin so, of n units."""
        w, u, b = (self._p[prefix + k] for k in "wub")
        n, h, c, states = n or self._width, None, None, []
        for x in inputs:
            gates = dy.affine_transform([b, w, x] if h is None else [b, w, x, u, h])
            i, o, g = dy.logistic(gates[:n]), dy.logistic(gates[2 * n : 3 * n]), dy.tanh(gates[3 * n :])
            c = dy.cmult(i, g) if h is None else dy.cmult(i, g) + dy.cmult(dy.logistic(gates[n : 2 * n]), c)
            h = dy.cmult(o, dy.tanh(c))
            states.append(h)
        return states

    def _rvnn(self, tree):
        p, states = self._p, []
        for left, right, word in np.stack([tree["left"], tree["right"], tree["word"]], 1).tolist():
            if left < 0:
                z = dy.affine_transform([p["b_leaf"], p["w"], self._embed[word]])
            else:
                z = dy.affine_transform([p["b"], p["u"], dy.concatenate([states[left], states[right]])])
            states.append(dy.tanh(z))
        return [self._loss(states[-1], tree["label"])]

    def _td_rnn(self, sentence):
        p, row = self._p, [self._embed[w] for w in sentence["words"].tolist()]
        while len(row) > 1:
            pairs = zip(row, row[1:])  # noqa: B905
            row = [dy.tanh(dy.affine_transform([p["b"], p["u"], dy.concatenate(list(pair))])) for pair in pairs]
        return [self._loss(row[0], sentence["label"])]

    def _td_lstm(self, sentence):
        p, n = self._p, self._width
        row = [(self._embed[w], None) for w in sentence["words"].tolist()]
        while len(row) > 1:
            above = []
            for (h1, c1), (h2, c2) in zip(row, row[1:]):  # noqa: B905
                z = dy.affine_transform([p["b"], p["u"], dy.concatenate([h1, h2])])
                i, o, f1, f2 = (dy.logistic(z[k * n : (k + 1) * n]) for k in range(4))
                c = dy.cmult(i, dy.tanh(z[4 * n :]))
                c = c if c1 is None else c + dy.cmult(f1, c1) + dy.cmult(f2, c2)
                above.append((dy.cmult(o, dy.tanh(c)), c))
            row = above
        return [self._loss(row[0][0], sentence["label"])]

    def _bilstm(self, sentence):
        return self._tag([self._embed[w] for w in sentence["words"].tolist()], sentence["labels"])

    def _char_bilstm(self, sentence):
        spellings = iter(sentence["spellings"])
        words = sentence["words"].tolist()
        return self._tag([self._spelling(next(spellings)) if w < 0 else self._embed[w] for w in words], sentence["labels"])

    def _spelling(self, letters):
        n = self._p["spell.forward.u"].dim()[0][1]
        x = [self._tables["characters"][k] for k in letters.tolist()]
        return dy.concatenate([self._chain(x, "spell.forward.", n)[-1], self._chain(x[::-1], "spell.backward.", n)[-1]])

    def _tag(self, inputs, labels):
        p, losses = self._p, []
        forward, backward = self._chain(inputs, "forward."), self._chain(inputs[::-1], "backward.")[::-1]
        for f, b, label in zip(forward, backward, labels.tolist()):  # noqa: B905
            m = dy.tanh(dy.affine_transform([p["mlp_b"], p["mlp_w"], dy.concatenate([f, b])]))
            losses.append(self._loss(m, label))
        return losses
