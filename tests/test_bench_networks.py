"""The networks of `bench.networks`: their sizes, and that ways to run them agree."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from bench import networks
from cavs.memory import plan

# Millions of parameters, as published: torchvision's, without the biases that a normalisation follows.
MILLIONS = {"resnet50": 25.56, "resnet152": 60.19, "vgg16": 138.36, "densenet161": 28.68, "darknet53": 41.61}
CONVOLUTIONS = {"resnet50": 13, "resnet152": 47, "vgg16": 13, "densenet161": 78, "darknet53": 24}


@pytest.mark.parametrize("name", MILLIONS)
def test_sizes_are_those_that_were_published(name):
    network = networks.NETWORKS[name]()
    params = jax.eval_shape(network.init, jax.random.key(0))
    assert abs(sum(math.prod(x.shape) for x in jax.tree.leaves(params)) / 1e6 - MILLIONS[name]) < 0.006
    seen = []

    def conv3(x, w):
        seen.append(w.shape)
        return networks.conv(x, w)

    batch = jax.eval_shape(lambda key: network.batch(key, 2), jax.random.key(0))
    value = jax.eval_shape(lambda params, batch: network.loss(params, *batch, conv3=conv3), params, batch)
    assert value.shape == () and len(seen) == CONVOLUTIONS[name]


def test_checkpoints_do_not_change_the_loss():
    network = replace(networks.resnet((1, 1), 10, 16), side=32)
    params, batch = network.init(jax.random.key(0)), network.batch(jax.random.key(1), 4)
    value, again = (
        jax.jit(lambda params, batch, how=how: network.loss(params, *batch, **how))(params, batch)
        for how in ({}, {"remat": jax.checkpoint})
    )
    np.testing.assert_allclose(again, value, rtol=1e-4)


@pytest.mark.slow
def test_parts_of_a_batch_with_group_norm():
    """They are checked by the plan."""
    import cavs

    network = replace(networks.resnet((1, 1), 10, 16), side=32, norm="group")
    params, batch = network.init(jax.random.key(0)), network.batch(jax.random.key(1), 8)
    found = plan(lambda params, batch: cavs.data.mean(network.losses(params, *batch)), params, batch, parts=4)
    np.testing.assert_allclose(found.loss(params, found.batch(batch)), network.loss(params, *batch), rtol=1e-4)
