"""The checkpoint store: the truth of a run.

It knows nothing of models. It keeps named *sections*, each a tree of tensors and plain values or a block of
bytes, under `<storage>/<run_id>/step-<n>/`. A checkpoint that is not whole and verified is skipped; a
worker of an ended attempt can neither publish nor delete; loading runs no code.
"""
