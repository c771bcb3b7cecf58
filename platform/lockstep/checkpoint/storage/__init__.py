"""Where checkpoints are kept: a disk or an object store, behind one interface."""
