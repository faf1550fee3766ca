"""`loraplex deployments|aliases|pins`: what answers under a model id, and what keeps it there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_platform.cli.adapter_commands import find_version
from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    TenantOption,
    WhyOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonOption, day_of, moment_of, print_json, print_rows

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Model ids and the revisions that answer."
)
aliases = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Movable names of an adapter's versions."
)
pins = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Deployments that stay at a revision."
)

OwnerOption = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        "-t",
        show_default="the platform's own: the base model's",
        help="Slug or id of the tenant.",
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model id.")]
RevisionArgument = Annotated[str, typer.Argument(help="A revision: its id, rev_..., or number.")]
VersionOption = Annotated[
    str | None,
    typer.Option("--version", help="A version's id, or ADAPTER for its newest, or ADAPTER:NUMBER."),
]
BaseOption = Annotated[bool, typer.Option("--base", help="Answer with the base model.")]
BuildOption = Annotated[
    str | None,
    typer.Option("--build", help="Only replicas of this engine build, bld_...; 'any': of any."),
]
BookOption = Annotated[
    str | None,
    typer.Option(
        "--price-book", help="Bill by this book, prb_...; 'in-force': by the one of the day."
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option("--system-prompt", help="For chats without one of their own; '' for none."),
]
SamplingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sampling",
        metavar="NAME=VALUE",
        help="A default, as JSON: temperature=0.2, 'stop=[\"\\n\"]'; NAME= takes it away. May be repeated.",
    ),
]


# ---------------------------------------------------------------------------- deployments


@app.command("list")
def list_deployments(
    tenant: OwnerOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List model ids and what answers under each.

    Example:

      loraplex deployments list --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        found = list(admin.pages(_path(admin, tenant)))
    if as_json:
        print_json(found)
        return
    rows = [
        (item["name"], item["revision"]["number"], _what(item["revision"]), _followed(item))
        for item in found
    ]
    print_rows([("MODEL", "REVISION", "ANSWERS WITH", "FOLLOWS"), *rows])


@app.command("show")
def show_deployment(
    name: NameArgument,
    tenant: OwnerOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show all of a deployment's current revision.

    Example:

      loraplex deployments show support --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        found, _ = admin.read(f"{_path(admin, tenant)}/{name}")
    if as_json:
        print_json(found)
        return
    print_rows([("MODEL", found["name"]), ("FOLLOWS", _followed(found))])
    _print_revision(found["revision"])


@app.command("set")
def set_deployment(
    name: NameArgument,
    tenant: OwnerOption = None,
    version: VersionOption = None,
    base: BaseOption = False,
    follow: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER:ALIAS", help="Whatever version this alias names, now and on."
        ),
    ] = None,
    build: BuildOption = None,
    price_book: BookOption = None,
    system_prompt: PromptOption = None,
    sampling: SamplingOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Change what answers under a model id, from the next request on; what is not named stays.

    Refused while a rollout of it is on its way, and where somebody else has changed it meanwhile.

    Examples:

      loraplex deployments set support -t acme --version pirate:2 --sampling temperature=0.2

      loraplex deployments set support -t acme --follow pirate:production

      loraplex deployments set smollm2-135m --build any
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"{_path(admin, tenant)}/{name}"
        current, etag = _read_if_any(admin, path)
        body = _content(
            admin, tenant, current, version, base, build, price_book, system_prompt, sampling
        )
        if follow is not None:
            if version is not None or base:
                raise CommandError("give one of --version, --base and --follow")
            body.pop("version_id", None)
            body["follow"] = _alias_named(admin, tenant, follow)
        elif current is not None and current["follow"] and version is None and not base:
            body.pop("version_id", None)
            body["follow"] = current["follow"]
        changed = admin.change("PUT", path, body, etag)
    if as_json:
        print_json(changed)
        return
    revision = changed["revision"]
    typer.echo(f"{name} answers with {_what(revision)}, revision {revision['number']}")


@app.command("archive")
def archive_deployment(
    name: NameArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Take a model id away: its next request is a 404. Its history stays for the bills.

    Example:

      loraplex deployments archive support --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        admin.call("DELETE", f"{_path(admin, tenant)}/{name}")
    typer.echo(f"{name} is archived")


@app.command("revisions")
def list_revisions(
    name: NameArgument,
    tenant: OwnerOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List a deployment's revisions, newest first.

    Example:

      loraplex deployments revisions support --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"{_path(admin, tenant)}/{name}"
        current, _ = admin.read(path)
        found = list(admin.pages(f"{path}/revisions"))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            item["number"],
            item["id"],
            _what(item),
            moment_of(item["created_at"]),
            "current" if item["id"] == current["revision"]["id"] else None,
        )
        for item in found
    ]
    print_rows([("REVISION", "ID", "ANSWERS WITH", "MADE", ""), *rows])


@app.command("add-revision")
def add_revision(
    name: NameArgument,
    tenant: OwnerOption = None,
    version: VersionOption = None,
    base: BaseOption = False,
    build: BuildOption = None,
    price_book: BookOption = None,
    system_prompt: PromptOption = None,
    sampling: SamplingOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Make a revision that nothing answers with yet, for a rollout or a pin: the current one but for what is named.

    Example:

      loraplex deployments add-revision support -t acme --version pirate:2
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"{_path(admin, tenant)}/{name}"
        current, _ = admin.read(path)
        body = _content(
            admin, tenant, current, version, base, build, price_book, system_prompt, sampling
        )
        made = admin.call("POST", f"{path}/revisions", body)
    if as_json:
        print_json(made)
        return
    typer.echo(f"{made['id']}: revision {made['number']} of {name}, {_what(made)}")


@app.command("diff")
def diff(
    name: NameArgument,
    before: RevisionArgument,
    after: Annotated[
        str | None, typer.Argument(show_default="the current one", help="Another revision.")
    ] = None,
    tenant: OwnerOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show in what two revisions of a deployment differ.

    Example:

      loraplex deployments diff support 1 2 --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"{_path(admin, tenant)}/{name}"
        old = revision_named(admin, path, before)
        new = revision_named(admin, path, after)
        found = admin.call("GET", f"{path}/revisions/{new}", against=old)
    if as_json:
        print_json(found)
        return
    if not found["changes"]:
        typer.echo("They are the same.")
        return
    rows = [(item["field"], item["before"], item["after"]) for item in found["changes"]]
    print_rows([("FIELD", "BEFORE", "AFTER"), *rows])


# ---------------------------------------------------------------------------- aliases

AdapterArgument = Annotated[str, typer.Argument(help="The adapter's name or id, adp_...")]
AliasArgument = Annotated[str, typer.Argument(help="The alias, for example production.")]


@aliases.command("set")
def set_alias(
    adapter: AdapterArgument,
    alias: AliasArgument,
    version: Annotated[str, typer.Argument(help="A version's id, or its number.")],
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Have an alias name a version; deployments that follow it go with it, all at once.

    Example:

      loraplex aliases set pirate production 2 --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id, found = _adapter_named(admin, tenant, adapter)
        wanted = version if version.startswith("ver_") else f"{found['name']}:{version}"
        version_id = find_version([found], wanted)["id"]
        path = f"{_aliases_path(tenant_id, found)}/{alias}"
        _, etag = _read_if_any(admin, path)
        moved = admin.change("PUT", path, {"version_id": version_id}, etag)
    if as_json:
        print_json(moved)
        return
    followers = ", ".join(moved["moved"]) or "no deployment"
    typer.echo(f"{alias} is {found['name']}:{moved['version']}; {followers} moved with it")


@aliases.command("list")
def list_aliases(
    adapter: AdapterArgument,
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List an adapter's aliases and what they name.

    Example:

      loraplex aliases list pirate --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id, found = _adapter_named(admin, tenant, adapter)
        items = list(admin.pages(_aliases_path(tenant_id, found)))
    if as_json:
        print_json(items)
        return
    rows = [
        (item["alias"], item["version"], item["version_id"], moment_of(item["updated_at"]))
        for item in items
    ]
    print_rows([("ALIAS", "VERSION", "ID", "SINCE"), *rows])


@aliases.command("history")
def show_history(
    adapter: AdapterArgument,
    alias: AliasArgument,
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List what an alias named from when on, newest first.

    Example:

      loraplex aliases history pirate production --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id, found = _adapter_named(admin, tenant, adapter)
        events = list(admin.pages(f"{_aliases_path(tenant_id, found)}/{alias}/events"))
    if as_json:
        print_json(events)
        return
    numbers = {item["id"]: item["version"] for item in found["versions"]}
    rows = [
        (
            moment_of(event["at"]),
            "deleted" if event["version_id"] is None else numbers.get(event["version_id"]),
            event["version_id"],
        )
        for event in events
    ]
    print_rows([("FROM", "VERSION", "ID"), *rows])


@aliases.command("remove")
def remove_alias(
    adapter: AdapterArgument,
    alias: AliasArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Take an alias away. Refused while a deployment follows it; its history stays.

    Example:

      loraplex aliases remove pirate candidate --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id, found = _adapter_named(admin, tenant, adapter)
        admin.call("DELETE", f"{_aliases_path(tenant_id, found)}/{alias}")
    typer.echo(f"{alias} is gone")


# ---------------------------------------------------------------------------- pins


@pins.command("set")
def set_pin(
    name: NameArgument,
    tenant: TenantOption,
    reason: WhyOption,
    revision: Annotated[
        str | None, typer.Option(show_default="the current one", help="rev_..., or its number.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="YYYY-MM-DD", show_default="for good", help="Midnight UTC."),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Keep a tenant's requests for a model, its own or the base, at a revision, whatever is rolled out.

    Its end is told a week and a day before, and when it comes: in the log, and to webhooks.

    Example:

      loraplex pins set support -t acme --until 2027-01-01 --reason "audited until then"
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = str(admin.tenant(tenant)["id"])
        own = f"/tenants/{tenant_id}/deployments/{name}"
        where = where_answered(admin, tenant_id, name)
        body: dict[str, Any] = {
            "revision_id": revision_named(admin, where, revision),
            "until": None if until is None else _midnight(until),
            "reason": reason,
        }
        _, etag = _read_if_any(admin, f"{own}/pin")
        made = admin.change("PUT", f"{own}/pin", body, etag)
    if as_json:
        print_json(made)
        return
    end = "for good" if made["until"] is None else f"until {moment_of(made['until'])}"
    typer.echo(f"{tenant}'s {name} stays at revision {made['revision']} {end}")
    for problem in made["problems"]:
        typer.echo(f"warning: {problem.replace('_', ' ')}", err=True)


@pins.command("list")
def list_pins(
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List a tenant's pins, also those that have expired.

    Example:

      loraplex pins list --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        found = list(admin.pages(f"/tenants/{admin.tenant(tenant)['id']}/pins"))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            item["deployment"],
            item["revision"],
            item["state"],
            day_of(item["until"]) or "for good",
            ", ".join(item["problems"]) or None,
            item["reason"],
        )
        for item in found
    ]
    print_rows([("MODEL", "REVISION", "STATE", "UNTIL", "PROBLEMS", "REASON"), *rows])


@pins.command("remove")
def remove_pin(
    name: NameArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """End a pin: the current revision, or a rollout of it, answers from the next request on.

    Example:

      loraplex pins remove support --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        admin.call("DELETE", f"/tenants/{tenant_id}/deployments/{name}/pin")
    typer.echo(f"{name} is not pinned any more")


# ---------------------------------------------------------------------------- insides


def _path(admin: AdminClient, tenant: str | None) -> str:
    if tenant is None:
        return "/deployments"
    return f"/tenants/{admin.tenant(tenant)['id']}/deployments"


def where_answered(admin: AdminClient, tenant_id: str, name: str) -> str:
    """The path of what answers a tenant under a model id: its own deployment, else the platform's."""
    own = f"/tenants/{tenant_id}/deployments/{name}"
    return own if _read_if_any(admin, own)[0] is not None else f"/deployments/{name}"


def _read_if_any(admin: AdminClient, path: str) -> tuple[dict[str, Any] | None, str | None]:
    from loraplex_platform.admin_client import AdminApiError

    try:
        return admin.read(path)
    except AdminApiError as error:
        if error.status != 404:
            raise
        return None, None


def _content(
    admin: AdminClient,
    tenant: str | None,
    current: dict[str, Any] | None,
    version: str | None,
    base: bool,
    build: str | None,
    price_book: str | None,
    system_prompt: str | None,
    sampling: list[str] | None,
) -> dict[str, Any]:
    """A revision's content as the API takes it: the current one but for what is named."""
    if version is not None and base:
        raise CommandError("give either --version or --base")
    revision = {} if current is None else current["revision"]
    params = dict(revision.get("params", {}))
    body: dict[str, Any] = {
        "version_id": revision.get("version_id"),
        "engine_build_id": revision.get("engine_build_id"),
        "params": params,
    }
    if version is not None:
        if tenant is None:
            raise CommandError(
                "the platform's own deployment answers with the base: leave --version"
            )
        adapters = admin.adapters(str(admin.tenant(tenant)["id"]))
        body["version_id"] = find_version(adapters, version)["id"]
    elif base:
        body["version_id"] = None
    if build is not None:
        body["engine_build_id"] = None if build == "any" else build
    if price_book is not None:
        body["price_book_id"] = None if price_book == "in-force" else price_book
    if system_prompt is not None:
        params["system_prompt"] = system_prompt or None
    if sampling:
        params["sampling"] = _merged(params.get("sampling", {}), sampling)
    return body


def _merged(defaults: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    import json

    merged = dict(defaults)
    for change in changes:
        name, separator, text = change.partition("=")
        if not separator:
            raise CommandError(
                f"--sampling {change}: write NAME=VALUE, for example temperature=0.2"
            )
        if not text:
            merged.pop(name, None)
            continue
        try:
            merged[name] = json.loads(text)
        except ValueError:
            raise CommandError(f"--sampling {change}: its value is not JSON") from None
    return merged


def revision_named(admin: AdminClient, path: str, wanted: str | None) -> str:
    """A revision's id, by its number or itself, of the deployment at `path`; None: the current one."""
    if wanted is None:
        return str(admin.read(path)[0]["revision"]["id"])
    if not wanted.isdigit():
        return wanted
    for revision in admin.pages(f"{path}/revisions"):
        if revision["number"] == int(wanted):
            return str(revision["id"])
    raise CommandError(f"there is no revision {wanted}: see `loraplex deployments revisions`")


def _adapter_named(
    admin: AdminClient, tenant: str | None, wanted: str
) -> tuple[str, dict[str, Any]]:
    if tenant is None:
        raise CommandError("aliases are of tenants' adapters: name the --tenant")
    tenant_id = str(admin.tenant(tenant)["id"])
    for adapter in admin.adapters(tenant_id):
        if wanted in {adapter["id"], adapter["name"]}:
            return tenant_id, adapter
    raise CommandError(f"there is no adapter {wanted}: see `loraplex adapters list`")


def _alias_named(admin: AdminClient, tenant: str | None, wanted: str) -> dict[str, str]:
    name, separator, alias = wanted.partition(":")
    if not separator:
        raise CommandError(f"--follow {wanted}: write ADAPTER:ALIAS, for example pirate:production")
    return {"adapter_id": _adapter_named(admin, tenant, name)[1]["id"], "alias": alias}


def _aliases_path(tenant_id: str, adapter: dict[str, Any]) -> str:
    return f"/tenants/{tenant_id}/adapters/{adapter['id']}/aliases"


def _midnight(day: str) -> int:
    from datetime import UTC, datetime

    try:
        return int(datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise CommandError(f"--until {day}: write a day as YYYY-MM-DD") from None


def _what(revision: dict[str, Any]) -> str:
    """A revision's adapter and what else is set, in a few words."""
    if revision["version_id"] is None:
        parts = ["the base"]
    else:
        parts = [f"{revision['adapter_name']}:{revision['version']}"]
    if revision["engine_build_id"] is not None:
        parts.append(f"on {revision['engine_build_id']}")
    if revision["price_book_id"] is not None:
        parts.append(f"billed by {revision['price_book_id']}")
    parts += sorted(revision["params"])
    return ", ".join(parts)


def _followed(deployment: dict[str, Any]) -> str | None:
    follow = deployment["follow"]
    return None if follow is None else f"{follow['alias']} of {follow['adapter_id']}"


def _print_revision(revision: dict[str, Any]) -> None:
    params = revision["params"]
    print_rows(
        [
            ("REVISION", f"{revision['number']} ({revision['id']})"),
            ("WEIGHTS", revision["base_revision"]),
            ("ADAPTER", _what(revision | {"params": {}})),
            ("DIGEST", revision["digest"]),
            ("ENGINE BUILD", revision["fingerprint"] or "any"),
            ("PRICE BOOK", revision["price_book_id"] or "the one in force"),
            ("SYSTEM PROMPT", params.get("system_prompt")),
            *(
                (name.upper().replace("_", " "), value)
                for name, value in params.get("sampling", {}).items()
            ),
            ("MADE", moment_of(revision["created_at"])),
        ]
    )
