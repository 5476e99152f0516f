"""What surrounds a training loop: evaluating, predicting, keeping checkpoints, and scores. It uses loaders and checkpoints."""
