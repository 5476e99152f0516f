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
        self._embed = self._model.lookup_parameters_from_numpy(params["embed"])
        self._p = {k: self._model.parameters_from_numpy(v.T) for k, v in params.items() if k != "embed"}
        self._trainer = dy.SimpleSGDTrainer(self._model)
        self._trainer.set_clip_threshold(0)
        self._width = params["out_w"].shape[0]

    def params(self):
        return dict({k: p.as_array().T for k, p in self._p.items()}, embed=self._embed.as_array())

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
        w, u, b = (self._p[k] for k in "wub")
        n, h, c, losses = self._width, None, None, []
        for word, label in zip(chain["words"].tolist(), chain["labels"].tolist()):  # noqa: B905  (Python 3.8)
            x = self._embed[word]
            gates = dy.affine_transform([b, w, x] if h is None else [b, w, x, u, h])
            i, o, g = dy.logistic(gates[:n]), dy.logistic(gates[2 * n : 3 * n]), dy.tanh(gates[3 * n :])
            c = dy.cmult(i, g) if h is None else dy.cmult(i, g) + dy.cmult(dy.logistic(gates[n : 2 * n]), c)
            h = dy.cmult(o, dy.tanh(c))
            losses.append(self._loss(h, label))
        return losses
