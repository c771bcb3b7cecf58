"""Statements signed and checked: DSSE envelopes, by securesystemslib. The keys are PEM files, which openssl makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import SpecError
from lockstep.parsing import one_line
from lockstep.paths import shown
from lockstep.proof import problems

PAYLOAD_TYPE = "application/vnd.in-toto+json"


def signed(payload: bytes, key: Path) -> dict[str, Any]:
    """The payload in an envelope that the private key of this file has signed. SpecError where it is none."""
    private = _loaded(key, "private", lambda pem, load: load.load_pem_private_key(pem, None))
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    try:
        envelope.sign(CryptoSigner(private))
    except Exception as error:
        raise _unfit(key, error) from error
    document: dict[str, Any] = envelope.to_dict()
    return document


def is_envelope(document: Any) -> bool:
    """Whether a document is signed."""
    return isinstance(document, dict) and "payloadType" in document


def opened(document: dict[str, Any], key: Path | None) -> tuple[bytes, str | None, bool]:
    """The payload of an envelope, the id of the key that has signed it, and whether the public `key` says so too.

    Without a key only what the envelope claims is known. SpecError where it is no envelope, or not a key.
    """
    _needed()
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    try:
        envelope = Envelope.from_dict(json.loads(json.dumps(document)))
        payload, claimed = bytes(envelope.payload), next(iter(envelope.signatures), None)
    except Exception as error:
        raise problems.NO_ENVELOPE(got=f"{type(error).__name__}: {one_line(error)}") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise problems.OTHER_PAYLOAD(got=shown(envelope.payload_type), wanted=PAYLOAD_TYPE)
    if key is None:
        return payload, claimed, False
    public = public_key(key)
    try:
        trusted_key = SSlibKey.from_crypto(public)
    except ValueError as error:
        raise _unfit(key, error) from error
    try:
        envelope.verify([trusted_key], 1)
    except VerificationError:
        return payload, trusted_key.keyid, False
    return payload, trusted_key.keyid, True


def _unfit(key: Path, error: Exception) -> SpecError:
    return problems.KEY_UNFIT(file=key, got=error)


def public_key(key: Path) -> Any:
    """The public key of this file. SpecError where it is none."""
    return _loaded(key, "public", lambda pem, load: load.load_pem_public_key(pem))


def _loaded(key: Path, kind: str, load: Callable[[bytes, Any], Any]) -> Any:
    _needed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        return load(key.read_bytes(), serialization)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason = next(iter(str(error).splitlines()), "")
        problem = problems.NO_PUBLIC_KEY if kind == "public" else problems.NO_PRIVATE_KEY
        raise problem(file=key, got=reason) from error


def _needed() -> None:
    try:
        import securesystemslib.dsse  # noqa: F401
    except ImportError as error:
        raise problems.NO_SIGNATURES(got=error) from error
