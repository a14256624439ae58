"""Records and certificates: what a member signs, and which records of others it believes."""

from __future__ import annotations

from atoll.core.errors import InputError
from atoll.fabric.identity.identity import Identity, Person, RefusedError, Verifier
from atoll.fabric.registry.records import (
    Metadata,
    Record,
    SessionState,
    decode_metadata,
    signed_bytes,
)


def sign_record(
    identity: Identity,
    fabric_id: str,
    sid: str,
    state: SessionState,
    rev: int,
    signed_s: float,
    body: bytes,
) -> Record:
    """Return a record signed by a member."""
    signature = identity.sign(signed_bytes(fabric_id, sid, state, rev, signed_s, body))
    return Record(sid, state, rev, signed_s, body, identity.certificate, signature)


def refusal(verifier: Verifier, record: Record) -> str | None:
    """Return why a record is not believed, in a few words; None if it is.

    Its certificate must be of this fabric, own the session and say the same of name, provider and role
    as the record; or it is a hub's and the record says LEFT.
    """
    try:
        person = verifier.person(record.certificate)
        if person.slot != record.slot:
            if record.state is not SessionState.LEFT or person.role != "hub":
                return "session of another"
        elif not _honest(person, decode_metadata(record.body)):
            return "forged provider"
    except RefusedError as error:
        return error.reason
    except InputError:
        return "malformed"
    signed = signed_bytes(
        verifier.fabric_id, record.sid, record.state, record.rev, record.signed_s, record.body
    )
    return None if person.check(signed, record.signature) else "signature"


def node_name(certified: str, chosen_name: str) -> str:
    """Return the name a member may use: that of its certificate, with its own after a slash if it has one."""
    if not chosen_name or chosen_name == certified:
        return certified
    if chosen_name.startswith(f"{certified}/"):
        return chosen_name
    return f"{certified}/{chosen_name}"


def _honest(person: Person, metadata: Metadata) -> bool:
    return (
        metadata.provider == person.provider
        and metadata.role == person.role
        and node_name(person.name, metadata.name) == metadata.name
    )
