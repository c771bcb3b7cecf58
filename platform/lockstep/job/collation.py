"""Collation of samples as torch does it, but for a `Counter`, to whose numbers torch would add those of the first sample."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch.utils.data._utils.collate import collate, default_collate_fn_map


def collated(samples: Sequence[Any]) -> Any:
    """One micro-batch of samples, by torch's `default_collate` with mappings that are filled item by item."""
    functions = {**default_collate_fn_map, MutableMapping: _collated_mappings}
    return collate(list(samples), collate_fn_map=functions)


def _collated_mappings(
    mappings: Sequence[MutableMapping[Any, Any]], *, collate_fn_map: dict[Any, Callable[..., Any]]
) -> MutableMapping[Any, Any]:
    first = mappings[0]
    # A Counter gives 0 for what it has not counted, so each sample has a number for the keys of all.
    keys = dict.fromkeys(key for each in mappings for key in each) if isinstance(first, Counter) else first
    inner = {key: collate([each[key] for each in mappings], collate_fn_map=collate_fn_map) for key in keys}
    return with_items(first, inner)


def with_items(mapping: MutableMapping[Any, Any], items: dict[Any, Any]) -> MutableMapping[Any, Any]:
    """A copy of a mapping, whose class may hold more than its items, with these assigned one by one; a dict where the class refuses them."""
    try:
        clone = copy.copy(mapping)
        for key, value in items.items():
            clone[key] = value
        return clone
    except TypeError:
        return items
