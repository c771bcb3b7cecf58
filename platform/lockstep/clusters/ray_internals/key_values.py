"""The key-value store that each Ray cluster keeps in its GCS. See `unavailable`."""

from __future__ import annotations


def put(key: str, value: bytes, namespace: bytes) -> None:
    """Keep a value in the cluster that this process is connected to."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key.encode(), value, namespace=namespace)


def values(address: str, prefix: str, namespace: bytes) -> list[bytes]:
    """The values of all keys with this prefix, in the cluster whose GCS is at `address`."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=address)
    keys = client.internal_kv_keys(prefix.encode(), namespace=namespace)
    return [client.internal_kv_get(key, namespace=namespace) for key in keys]
