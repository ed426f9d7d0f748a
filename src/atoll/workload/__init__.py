"""What a learner trains on and what it trains: text, tokens, batches, models, and the loss on held-out text.

A room without a clock, a network or a protocol. Everything in it is a function of its arguments and of a seed: a
batch of (seed, stream, position), an initial model of (shape, seed), a split of the documents' own content. That is
what lets a learner restart, a peer take over its stream, and a replay repeat the run.
"""
