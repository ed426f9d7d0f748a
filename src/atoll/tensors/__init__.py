"""Pure tensor arithmetic: which tensors travel together, how they are read and written, merged and stepped.

Nothing in this room knows of learners, rounds, clocks or sockets. `inventory` walks a model, `fragmentation` divides
sizes, `layout` makes a table of slots out of both; from there on a fragment is one flat fp32 vector, and `access`,
`merge` and `outer` are arithmetic on such vectors.
"""
