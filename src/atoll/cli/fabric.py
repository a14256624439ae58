"""`atoll fabric`: make a fabric, let members in, put them out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.shared_options import AsJson
from atoll.core.errors import UsageError
from atoll.core.extras import require_extras
from atoll.report.terminal import console, emit, note, table

if TYPE_CHECKING:
    from atoll.fabric.identity.authority import IssuedMember

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Make and run a fabric.")
_DEFAULT_FOLDER = Path("fabric")
_NEXT = {"worker": "atoll join", "gateway": "atoll gateway", "operator": "atoll nodes"}
_DAY_S = 86_400.0

BySite = Annotated[
    bool,
    typer.Option("--by-site", help="Workers keep to their site, for thousands of members."),
]
Folder = Annotated[Path, typer.Option("--folder", help="Folder of the fabric's authority.")]


@app.command()
def init(
    hub: Annotated[
        list[str],
        typer.Option("--hub", help="Address host:port where members reach a hub; 1 to 5 of them."),
    ],
    name: Annotated[str, typer.Option("--name", help="Name of the fabric, and its provider.")],
    folder: Folder = _DEFAULT_FOLDER,
    slots: Annotated[
        int,
        typer.Option("--slots", help="Most members there can be, up to 10000; more later: grow."),
    ] = 256,
    days: Annotated[int, typer.Option("--days", min=1, help="How long members may stay.")] = 365,
    by_site: BySite = False,
    as_json: AsJson = False,
) -> None:
    """Make an authority, the tokens of its hubs, and a first operator's; asks nothing.

    An existing fabric is never overwritten. Keep ca.key safe: whoever has it can let anybody in.
    """
    require_extras("fabric")
    from atoll.fabric.identity.access import TOKEN_FILE
    from atoll.fabric.identity.authority import Authority

    authority = Authority.create(folder, name, hub, slots=slots, days=days, by_site=by_site)
    hubs = [m for m in authority.members if m.role == "hub"]
    if as_json:
        emit(
            {
                "fabric": authority.fabric_id,
                "name": authority.name,
                "folder": folder,
                "hubs": [
                    {"address": address, "token": folder / f"hub-{member.slot}.token"}
                    for member, address in zip(hubs, authority.hubs, strict=True)
                ],
                "operator": folder / TOKEN_FILE,
                "slots": authority.slots,
            },
            as_json,
        )
        return
    out = console()
    out.print(f"Fabric {authority.name!r} ({authority.fabric_id}) is in {folder}.", soft_wrap=True)
    out.print("\nNext, on each hub's machine (copy its token there):")
    for member, address in zip(hubs, authority.hubs, strict=True):
        token = folder / f"hub-{member.slot}.token"
        out.print(f"  atoll hub @{token}    # {address}", soft_wrap=True)
    out.print("\nThen let members in, and join with what that prints:")
    out.print(
        f"  atoll fabric issue alps --provider ethz --role worker --folder {folder}", soft_wrap=True
    )
    out.print("  atoll join --fabric TOKEN -- vllm serve MODEL", soft_wrap=True)
    out.print(f"  atoll nodes --fabric @{folder / TOKEN_FILE}", soft_wrap=True)


@app.command()
def issue(
    name: Annotated[str, typer.Argument(help="Name of the member: a site, a user, a machine.")],
    provider: Annotated[str, typer.Option("--provider", help="Who runs it; others trust by this.")],
    role: Annotated[
        str, typer.Option("--role", help="worker, gateway (may also serve) or operator.")
    ] = "worker",
    folder: Folder = _DEFAULT_FOLDER,
    days: Annotated[int, typer.Option("--days", min=1, help="How long it is valid.")] = 365,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the token there, readable by you only.")
    ] = None,
) -> None:
    """Let a member in: print its token, which holds its key and is shown only once.

    Many nodes, such as a Slurm array, may use one token. No hub has to be told.
    """
    require_extras("fabric")
    from atoll.fabric.identity.authority import Authority, write_secret

    if out is not None and out.exists():
        raise UsageError(f"{out} exists already", field="--out", hint="name another file")
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", field="--out")
    token = Authority(folder).issue(name, provider, role, days=days).pack()
    if out is None:
        typer.echo(token)
    else:
        write_secret(out, token + "\n")
        note(f"{name}'s token is in {out}: {_NEXT[role]} --fabric @{out} ...")


@app.command()
def renew(
    name: Annotated[str, typer.Argument(help="Name of the member.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the token there; the member's old one may be replaced."),
    ] = None,
    folder: Folder = _DEFAULT_FOLDER,
    days: Annotated[int, typer.Option("--days", min=1, help="How long it is valid.")] = 365,
) -> None:
    """Give a member another token, with the hubs of today; its old one goes on until it expires."""
    require_extras("fabric")
    from atoll.fabric.identity.authority import Authority, write_secret

    if out is not None and not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", field="--out")
    token = Authority(folder).renew(name, days=days).pack()
    if out is None:
        typer.echo(token)
    else:
        write_secret(out, token + "\n")
        note(f"{name}'s new token is in {out}; restart what uses it, one after the other")


@app.command("add-hub")
def add_hub(
    address: Annotated[str, typer.Argument(help="Address host:port where members reach it.")],
    folder: Folder = _DEFAULT_FOLDER,
) -> None:
    """Have one more hub; those that run need not be told, members hear of it with their next token."""
    require_extras("fabric")
    from atoll.fabric.identity.authority import Authority

    path = Authority(folder).add_hub(address)
    note(f"on its machine (copy the token there): atoll hub @{path}")
    note("then give members new tokens: atoll fabric renew NAME --out FILE")


@app.command()
def grow(
    slots: Annotated[
        int, typer.Option("--slots", help="Most members there can be: 10000 at most.")
    ],
    folder: Folder = _DEFAULT_FOLDER,
    by_site: BySite = False,
) -> None:
    """Have room for more members: hubs started again allow it, nobody else has to be told."""
    require_extras("fabric")
    from atoll.fabric.identity.authority import Authority

    paths = Authority(folder).grow(slots, by_site=by_site)
    note("restart the hubs, one after the other, with their tokens of now:")
    for path in paths:
        note(f"  atoll hub @{path}" if path.exists() else f"  {path} is not here: renew that hub")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the member.")],
    folder: Folder = _DEFAULT_FOLDER,
) -> None:
    """Put a member out; hubs that watch this folder's revoked.json tell everybody within seconds."""
    require_extras("fabric")
    from atoll.fabric.identity.authority import Authority

    gone = Authority(folder).revoke(name)
    note(
        f"{gone.name} ({gone.slot}) is revoked; copy {folder / 'revoked.json'} beside the token of "
        "each hub that runs elsewhere"
    )


@app.command("list")
def list_members(folder: Folder = _DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """List who was let in, and who was put out."""
    require_extras("fabric")
    from atoll.fabric.identity.authority import Authority

    authority = Authority(folder)
    now_s = time.time()
    if as_json:
        emit([_as_dict(member, now_s) for member in authority.members], as_json)
        return
    rows = [
        (m.name, m.provider, m.role, m.slot, _member_state(m, now_s), f"{m.serial[:12]}...")
        for m in authority.members
    ]
    members = sum(1 for member in authority.members if member.role != "hub")
    console().print(
        table(
            ("name", "provider", "role", "slot", "standing", "serial"),
            rows,
            title=f"Fabric {authority.name}",
            caption=f"{members} of {authority.slots} slots taken",
        )
    )


@app.command()
def show(
    fabric: Annotated[
        str | None, typer.Argument(help="A token, @file or folder; default: $ATOLL_FABRIC.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a token holds, without its key."""
    require_extras("fabric")
    from atoll.fabric.identity.access import Access

    access = Access.open(fabric)
    identity = access.identity
    facts: dict[str, object] = {"fabric": access.fabric_id, "hubs": list(access.hubs)}
    if access.is_open:
        facts["certificates"] = "none: an open fabric"
    else:
        person = access.verifier().person(identity.certificate)
        expires = time.strftime("%Y-%m-%d", time.gmtime(person.expires_s))
        facts |= {
            "name": identity.name,
            "provider": identity.provider,
            "role": identity.role,
            "slot": identity.slot,
            "serial": f"{person.serial:x}",
            "expires": expires,
        }
    if as_json:
        emit(facts, as_json)
        return
    for key, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else value
        console().print(f"{key:12s} {text}", soft_wrap=True)


def _member_state(member: IssuedMember, now_s: float) -> str:
    if member.revoked_s is not None:
        return "revoked"
    days = (member.expires_s - now_s) / _DAY_S
    return "expired" if days < 0 else f"{days:.0f} days left"


def _as_dict(member: IssuedMember, now_s: float) -> dict[str, object]:
    return {
        "name": member.name,
        "provider": member.provider,
        "role": member.role,
        "slot": member.slot,
        "serial": member.serial,
        "issued_s": member.issued_s,
        "expires_s": member.expires_s,
        "revoked_s": member.revoked_s,
        "valid": member.revoked_s is None and now_s < member.expires_s,
    }
