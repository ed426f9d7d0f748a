"""Pure tensor arithmetic: which tensors form a fragment, and how fragments are read, written, merged and stepped.

Nothing in this room knows of learners, rounds, clocks or sockets. `inventory` lists a model's tensors, `fragmentation` divides
sizes, `layout` makes a table of slots from both. From then on a fragment is one flat fp32 vector, and `access`, `merge` and
`outer` are arithmetic on such vectors.
"""
