"""The secret of a run, by which the processes at both ends of a connection recognise each other.

Neither end sends the secret. The server sends a random challenge; the client answers with a challenge of its own and a keyed hash over
both; the server answers with another keyed hash. What follows on the connection is neither encrypted nor signed. So this keeps out every process that
does not know the secret, and not a machine between the two that can alter their packets. Nothing is imported that a worker's start would wait for.
"""

from __future__ import annotations

import hmac
import os
import socket

CHALLENGE_BYTES = 32
ANSWER_BYTES = 2 * CHALLENGE_BYTES
"""What a client sends first: its challenge, and the proof that it knows the secret."""
PROOF_BYTES = 32


class Secret:
    """Random bytes that only the processes of one run know. Its text shows nothing of them."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes | None = None) -> None:
        """`key` has at least 16 bytes; 32 new ones by default."""
        self._key = os.urandom(32) if key is None else key
        if len(self._key) < 16:
            raise ValueError(f"a secret has at least 16 bytes, not {len(self._key)}")

    def __repr__(self) -> str:
        return "Secret()"

    def __reduce__(self) -> tuple[type[Secret], tuple[bytes]]:
        return Secret, (self._key,)

    def answer(self, challenge: bytes) -> bytes:
        """What a client answers to a server's challenge."""
        client_challenge = os.urandom(CHALLENGE_BYTES)
        return client_challenge + self._proof(b"client", challenge + client_challenge)

    def confirmed(self, challenge: bytes, answer: bytes) -> bytes | None:
        """What the server of this challenge sends to a client that knows the secret; None for any other client."""
        client_challenge, proof = answer[:CHALLENGE_BYTES], answer[CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"client", challenge + client_challenge)):
            return None
        return self._proof(b"server", challenge + client_challenge)

    def is_confirmed(self, challenge: bytes, answer: bytes, confirmation: bytes) -> bool:
        """Whether a server's confirmation of this client's answer shows that it knows the secret."""
        return hmac.compare_digest(confirmation, self._proof(b"server", challenge + answer[:CHALLENGE_BYTES]))

    def _proof(self, side: bytes, challenges: bytes) -> bytes:
        return hmac.digest(self._key, b"lockstep " + side + challenges, "sha256")


def challenge() -> bytes:
    """A new challenge of a server."""
    return os.urandom(CHALLENGE_BYTES)


def is_server(connection: socket.socket, secret: Secret) -> bool:
    """As a client, whether the other end knows the secret, after it was shown that this one does. OSError where the connection ends or times out."""
    server_challenge = _received(connection, CHALLENGE_BYTES)
    answer = secret.answer(server_challenge)
    connection.sendall(answer)
    return secret.is_confirmed(server_challenge, answer, _received(connection, PROOF_BYTES))


def is_client(connection: socket.socket, secret: Secret) -> bool:
    """As a server, whether the other end knows the secret; if so it learns that this one does. OSError where the connection ends or times out."""
    server_challenge = challenge()
    connection.sendall(server_challenge)
    confirmation = secret.confirmed(server_challenge, _received(connection, ANSWER_BYTES))
    if confirmation is None:
        return False
    connection.sendall(confirmation)
    return True


def _received(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. ConnectionError where the other end closes before."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the other end has closed the connection")
        data += more
    return data
