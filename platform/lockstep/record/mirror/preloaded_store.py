"""Imported, it has imported what a recorder needs of the store of a database, for the process that `lockstep cluster up` forks recorders from."""

from lockstep.record.mirror.stores import warm_up

warm_up("sqlite://")
