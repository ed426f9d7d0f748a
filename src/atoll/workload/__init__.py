"""Data, models and evaluation: text, tokens, images, batches, models, and the loss on held-out data.

This room has no clock, network or protocol. Everything is a function of its arguments and a seed: a batch of (seed, stream,
position), an initial model of (shape, seed), a split of the documents' content. Therefore a learner can restart, a peer can
take over its stream, and a replay can repeat the run.
"""
