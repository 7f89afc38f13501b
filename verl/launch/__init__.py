"""`verl launch`: torchrun on every node of a mesh, over ssh.

plan (pure) -> run: one `node` process on each node -> torchrun -> the ranks.
"""
