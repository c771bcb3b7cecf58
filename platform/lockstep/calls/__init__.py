"""The calls for Python: what each command does, without a command line."""
