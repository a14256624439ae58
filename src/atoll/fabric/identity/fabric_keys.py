"""Who may say what: names of slots and sessions, the key space, and the rules hubs enforce.

alive/<slot>/<sid>                    token of a session
reg/<slot>/<sid>                      records as they change
sync/<slot>/<sid>                     question: what do you know
load/<slot>/<sid>                     load samples
req/<slot>/<sid>                      question: please serve this
assign/<slot>/<sid>                   question: please become this
host/<slot>/<sid>                     question: instances of a fleet, to start, look at and end
site/<part>/alive|reg|sync|load/...   the same four of members of a site, where the fabric is by site
in/<slot>/<sid>/<sender slot>         to a worker: cancel, credit, resume
out/<slot>/<sid>/<sender slot>/...    to an ingress: frames
"""

from __future__ import annotations

import hashlib
import re

PREFIX = "atoll"
MAX_HUBS = 5
MAX_SLOTS = 10_000

# One spelling each: m000 to m999, then m1000 to m9999.
_NAMES = r"(?:m[0-9]{3}|m[1-9][0-9]{3}|h[0-4])"
_SLOT = re.compile(_NAMES)
_SID = re.compile(_NAMES + r"-[0-9a-f]{16}")
_IN_PART = re.compile(PREFIX + r"/site/([0-9a-f]{8})(?=/)")


def member_slot(number: int) -> str:
    """Return the name of a member's slot: m000, m001, ..., m999, m1000, ..."""
    return f"m{number:03d}"


def hub_slot(number: int) -> str:
    """Return the name of a hub's slot: h0 to h4."""
    return f"h{number}"


def is_slot(text: str) -> bool:
    """Whether the text names a slot."""
    return _SLOT.fullmatch(text) is not None


def is_sid(text: str) -> bool:
    """Whether the text is a well-formed session id."""
    return _SID.fullmatch(text) is not None


def is_hub(slot_or_sid: str) -> bool:
    """Whether a slot or session belongs to a hub."""
    return slot_or_sid.startswith("h")


def slot_of(sid: str) -> str:
    """Return the slot that owns a session."""
    return sid.partition("-")[0]


def part_of(site: str) -> str:
    """Return the name of a site's part of the fabric, as it stands in keys."""
    return hashlib.blake2b(site.encode(), digest_size=4).hexdigest()


def in_part(part: str, key: str) -> str:
    """Return a key as it is in a part of the fabric; "" is the part of all."""
    return f"{PREFIX}/site/{part}{key.removeprefix(PREFIX)}" if part else key


def split_part(key: str) -> tuple[str, str]:
    """Return the part that a key is in, and the key as it is in the part of all."""
    match = _IN_PART.match(key)
    return ("", key) if match is None else (match[1], PREFIX + key[match.end() :])


def new_sid(slot: str, random: bytes) -> str:
    """Return a new session id of the slot, made of eight random bytes."""
    return f"{slot}-{random[:8].hex()}"


def alive(sid: str) -> str:
    """Key of the session's liveliness token."""
    return f"{PREFIX}/alive/{slot_of(sid)}/{sid}"


def reg(sid: str) -> str:
    """Key under which the owner of `sid` (or a hub, for what it wrote) pushes records."""
    return f"{PREFIX}/reg/{slot_of(sid)}/{sid}"


def sync(sid: str) -> str:
    """Key of the session's registry question."""
    return f"{PREFIX}/sync/{slot_of(sid)}/{sid}"


def load(sid: str) -> str:
    """Key of the session's load samples."""
    return f"{PREFIX}/load/{slot_of(sid)}/{sid}"


def req(sid: str) -> str:
    """Key of the session's request question."""
    return f"{PREFIX}/req/{slot_of(sid)}/{sid}"


def assign(sid: str) -> str:
    """Key of the session's assignment question."""
    return f"{PREFIX}/assign/{slot_of(sid)}/{sid}"


def host(sid: str) -> str:
    """Key of the session's question about instances that it hosts."""
    return f"{PREFIX}/host/{slot_of(sid)}/{sid}"


def inward(sid: str, sender_slot: str) -> str:
    """Key of what a caller in `sender_slot` tells the worker `sid` after a request."""
    return f"{PREFIX}/in/{slot_of(sid)}/{sid}/{sender_slot}"


def inward_all(sid: str) -> str:
    """Key expression of everything callers tell the worker `sid`."""
    return f"{PREFIX}/in/{slot_of(sid)}/{sid}/*"


def outward(sid: str, sender_slot: str, rest: str) -> str:
    """Key of frames a worker in `sender_slot` sends to the ingress `sid`; `rest` names the stream."""
    return f"{PREFIX}/out/{slot_of(sid)}/{sid}/{sender_slot}/{rest}"


def outward_all(sid: str) -> str:
    """Key expression of all frames sent to the ingress `sid`."""
    return f"{PREFIX}/out/{slot_of(sid)}/{sid}/**"


def sender_of(key: str) -> str:
    """Return the slot that wrote a key: hubs let nobody else write it.

    For `in` and `out` that is the sender, not the session addressed.
    """
    parts = key.split("/")
    if parts[1] in ("in", "out"):
        return parts[4] if len(parts) > 4 else ""
    return parts[2]


def own_sid(key: str) -> str | None:
    """Return the session id in a key that its writer may speak for, None if it is another's."""
    parts = key.split("/")
    if len(parts) != 4 or not is_sid(parts[3]) or slot_of(parts[3]) != parts[2]:
        return None
    return parts[3]


def hub_rules(
    slots: int, denied: frozenset[str] = frozenset(), *, by_site: bool = False
) -> dict[str, object]:
    """Return the access control of a hub: every slot writes its own keys, and reads what is public.

    Where the fabric is `by_site`, the same is true in every part of it.
    Hubs may do everything: they pass on what others were allowed to say elsewhere. A slot in `denied`
    may do nothing at all.
    """

    def everywhere(*names: str) -> list[str]:
        return _keys(*names, *(f"site/*/{name}" for name in names)) if by_site else _keys(*names)

    rules: list[dict[str, object]] = [
        _rule("pass", ["egress"], _EVERYTHING, [f"{PREFIX}/**"]),
        _rule("hub", ["ingress"], _EVERYTHING, [f"{PREFIX}/**"]),
        _rule("read", ["ingress"], ["declare_subscriber"], everywhere("reg/**", "load/**")),
        _rule(
            "ask",
            ["ingress"],
            ["query"],
            [*everywhere("sync/**"), *_keys("req/**", "assign/**", "host/**")],
        ),
        _rule(
            "look",
            ["ingress"],
            ["liveliness_query", "declare_liveliness_subscriber"],
            everywhere("alive/**"),
        ),
    ]
    names = [slot for slot in map(member_slot, range(slots)) if slot not in denied]
    hubs = [slot for slot in map(hub_slot, range(MAX_HUBS)) if slot not in denied]
    policies: list[dict[str, object]] = [{"rules": ["hub", "pass"], "subjects": ["hubs"]}]
    subjects: list[dict[str, object]] = [{"id": "hubs", "cert_common_names": hubs}]
    for slot in names:
        puts = everywhere(f"reg/{slot}/*", f"load/{slot}/*")
        puts += _keys(f"in/*/*/{slot}", f"out/*/*/{slot}/**")
        answers = everywhere(f"sync/{slot}/*")
        answers += _keys(*(f"{kind}/{slot}/*" for kind in ("req", "assign", "host")))
        slot_rules = [
            _rule(f"put {slot}", ["ingress"], ["put"], puts),
            _rule(f"answer {slot}", ["ingress"], ["declare_queryable", "reply"], answers),
            _rule(f"live {slot}", ["ingress"], ["liveliness_token"], everywhere(f"alive/{slot}/*")),
            _rule(
                f"hear {slot}",
                ["ingress"],
                ["declare_subscriber"],
                _keys(f"in/{slot}/**", f"out/{slot}/**"),
            ),
        ]
        rules += slot_rules
        subjects.append({"id": slot, "cert_common_names": [slot]})
        ids = ["pass", "read", "ask", "look", *(rule["id"] for rule in slot_rules)]
        policies.append({"rules": ids, "subjects": [slot]})
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": subjects,
        "policies": policies,
    }


_SIZES = {
    "alive/**": 0,
    "load/**": 1024,
    "assign/**": 64 * 1024,
    "req/**": 64 * 1024,
    "host/**": 256 * 1024,
    "in/**": 1024 * 1024,
    "out/**": 1024 * 1024,
    "reg/**": 2 * 1024 * 1024,
}
"""The largest payload that a hub passes on, in bytes: what goes to everybody is short."""
_OF_SITES = ("alive/**", "load/**", "reg/**")


def hub_sizes(*, by_site: bool = False) -> list[dict[str, object]]:
    """Return what hubs say to messages that are too large: they drop them."""
    sizes = _SIZES | ({f"site/*/{n}": _SIZES[n] for n in _OF_SITES} if by_site else {})
    return [
        {
            "id": f"size {name.removesuffix('/**')}",
            "flows": ["ingress"],
            "messages": ["put", "delete", "query", "reply"],
            "key_exprs": _keys(name),
            "size_limit": most,
        }
        for name, most in sizes.items()
    ]


_EVERYTHING = [
    "put",
    "delete",
    "declare_subscriber",
    "query",
    "reply",
    "declare_queryable",
    "liveliness_token",
    "liveliness_query",
    "declare_liveliness_subscriber",
]


def _keys(*names: str) -> list[str]:
    return [f"{PREFIX}/{name}" for name in names]


def _rule(name: str, flows: list[str], messages: list[str], key: list[str]) -> dict[str, object]:
    return {
        "id": name,
        "permission": "allow",
        "flows": flows,
        "messages": messages,
        "key_exprs": key,
    }
