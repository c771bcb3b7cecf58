"""The runs of a storage: their folders, names, leases and pins."""
