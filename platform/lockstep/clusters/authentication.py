"""Authentication of a Ray cluster: the token's file, the environment that points to it, and the rule that nothing listens openly without one.

Ray's job API runs any code that it is sent, so whatever listens beyond this machine requires the token. Ray gets the token
by the name of its file (mode 0600) in the environment; it is on no command line and in no record.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.clusters import problems

LOOPBACK_ONLY = {
    # 1 has Ray replace 127.0.0.1 by the machine's outer address, and its servers listen on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # By themselves they listen at the address of the machine's name.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""The environment of a cluster whose nodes are all on this machine: nothing listens beyond the loopback interface."""


def is_loopback(host: str) -> bool:
    """Whether a name or an address resolves only to this machine's loopback."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def refuse_open(host: str, *, token: bool) -> None:
    """SpecError for a server that would listen beyond loopback without a token."""
    if not token and not is_loopback(host):
        raise problems.OPEN(got=host)


def write_token(path: Path) -> None:
    """A new random token in a file that only its owner can read. StorageError where that cannot be written."""
    write_secret(path, secrets.token_hex(32))


def write_secret(path: Path, text: str) -> None:
    """`text` as a new file that only its owner can read. StorageError where that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise problems.SECRET_UNWRITABLE(what=path.stem, file=path, got=error.strerror) from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def rays_token() -> Path:
    """The file in which Ray keeps this user's token."""
    return Path.home() / ".ray" / "auth_token"


def guard_rays_token() -> None:
    """Make Ray's token file before Ray does, or remove other users' right to read it: Ray leaves it readable by all."""
    path = rays_token()
    if not path.exists():
        write_token(path)
    elif path.stat().st_mode & 0o077:
        path.chmod(0o600)


def host_of(address: str) -> str:
    """The host of `host:port` or of a URL."""
    return urlsplit(address if "://" in address else f"ray://{address}").hostname or ""
