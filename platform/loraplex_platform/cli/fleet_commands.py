"""`loraplex engine-builds|residency|drift`: what computes, what stays in memory, and where that is not so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from loraplex_platform.cli.adapter_commands import VersionArgument, find_version
from loraplex_platform.cli.errors import CommandGroup
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    TenantOption,
    WhyOption,
    open_admin,
)
from loraplex_platform.cli.output import (
    JsonOption,
    SearchOption,
    moment_of,
    print_json,
    print_rows,
    searched,
)

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient, Json

builds = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="What ever computed: weights, dtype, engine."
)
residency = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Adapter versions that every replica keeps in memory.",
)


@builds.command("list")
def list_builds(
    search: SearchOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List engine builds, newest first, and the replicas that run each now.

    They are searched by fingerprint and base model.

    Example:

      loraplex engine-builds list
    """
    with open_admin(data_dir, control_url) as admin:
        found = list(admin.pages("/engine-builds", **searched(search)))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            item["id"],
            item["base_model"],
            item["facts"].get("dtype"),
            item["facts"].get("backends", {}).get("quantization"),
            item["fingerprint"][:19],
            ", ".join(item["replicas"] or []) or ("yes" if item["is_running"] else None),
            moment_of(item["last_seen_at"]),
        )
        for item in found
    ]
    print_rows([("BUILD", "BASE", "DTYPE", "WEIGHTS", "FINGERPRINT", "REPLICAS", "SEEN"), *rows])


def fleet(
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show the replicas and gateways that are there now: load, queue, memory, adapters and how long they load.

    Example:

      loraplex fleet
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.fleet()
    if as_json:
        print_json(found)
        return
    header = ("REPLICA", "STATE", "DEVICE", "DTYPE", "RUNNING", "WAITING", "KV", "ADAPTERS")
    print_rows([(*header, "TOKENS/s", "FINGERPRINT"), *map(_replica_row, found["replicas"])])
    loads = [row for replica in found["replicas"] for row in _load_rows(replica)]
    if loads:
        print_rows([("REPLICA", "LOADS FROM", "LOADS", "LAST", "P50", "P95"), *loads])
    rows = [(one["gateway_id"], moment_of(one["last_seen_at"])) for one in found["gateways"]]
    print_rows([("GATEWAY", "SEEN"), *rows])


def _replica_row(replica: Json) -> tuple[object, ...]:
    stats = replica["stats"]
    load: tuple[object, ...] = (None, None, None, None)
    if stats is not None:
        load = (
            stats["num_running"],
            stats["num_waiting"],
            f"{stats['kv_usage']:.0%}",
            len(stats["adapters_resident"]),
        )
    return (
        *(replica[field] for field in ("replica_id", "state", "device", "dtype")),
        *load,
        f"{replica['generation_tokens_per_s']:.1f}",
        replica["model_fingerprint"][:19],
    )


def _load_rows(replica: Json) -> list[tuple[object, ...]]:
    times = (replica["stats"] or {}).get("adapter_load_times", {})
    return [
        (
            replica["replica_id"],
            tier,
            found["loads_total"],
            *(f"{found[name] * 1000:,.0f} ms" for name in ("last_s", "p50_s", "p95_s")),
        )
        for tier, found in sorted(times.items())
    ]


@residency.command("add")
def add_residency(
    version: VersionArgument,
    tenant: TenantOption,
    reason: WhyOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Have every replica load a version and keep it in memory, those of now and those to come.

    Example:

      loraplex residency add pirate:2 --tenant acme --reason "their launch"
    """
    with open_admin(data_dir, control_url) as admin:
        version_id = _version_id(admin, tenant, version)
        told = admin.call("PUT", f"/fleet/residency/{version_id}", {"reason": reason})
    _show_outcomes(told, "kept", as_json=as_json)


@residency.command("remove")
def remove_residency(
    version: VersionArgument,
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Let every replica evict a version like any other; what runs with it finishes.

    Example:

      loraplex residency remove pirate:2 --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        version_id = _version_id(admin, tenant, version)
        told = admin.call("DELETE", f"/fleet/residency/{version_id}")
    _show_outcomes(told, "not kept any more", as_json=as_json)


@residency.command("list")
def list_residency(
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List what every replica is to keep in memory, of all tenants.

    Example:

      loraplex residency list
    """
    with open_admin(data_dir, control_url) as admin:
        found = list(admin.pages("/fleet/residency"))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            f"{item['adapter_name']}:{item['version']}",
            item["version_id"],
            item["tenant_id"],
            item["reason"],
        )
        for item in found
    ]
    print_rows([("VERSION", "ID", "TENANT", "REASON"), *rows])


def drift(
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show where the fleet is not as it is desired; exit status 1 if it is not.

    Adapters that a replica does not keep in memory, with the engine's reason; engine builds that a revision, pin or
    rollout names and no replica runs; other weights than the base model's deployment names.

    Example:

      loraplex drift
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.call("GET", "/fleet/drift")
    if as_json:
        print_json(found)
    else:
        _show_drift(found)
    if found["has_drift"]:
        raise typer.Exit(1)


def _show_drift(found: Json) -> None:
    for replica in found["replicas"]:
        name = replica["replica_id"]
        if not replica["answers"]:
            typer.echo(f"{name}: does not answer")
        for item in replica["missing"]:
            reason = item["reason"] or ("loading" if item["is_pinned"] else "not told yet")
            since = moment_of(item["since"])
            typer.echo(f"{name}: {item['version_id']} is not in memory since {since}: {reason}")
        for digest in replica["extra"]:
            typer.echo(f"{name}: keeps {digest}, which is not desired")
        if replica["weights"] is not None:
            typer.echo(
                f"{name}: serves weights {replica['weights']['serves']}; {replica['base_model']}'s deployment "
                f"names {replica['weights']['named']}"
            )
    for build in found["builds"]:
        wanted = ", ".join(
            f"{item['deployment']} ({item['wanted_as']})" for item in build["wanted_by"]
        )
        typer.echo(
            f"{build['engine_build_id']}: no replica runs it since {moment_of(build['since'])}; named by {wanted}"
        )
    if not found["has_drift"]:
        typer.echo(f"{len(found['replicas'])} replicas, all as desired")


def _version_id(admin: AdminClient, tenant: str, version: str) -> str:
    return str(find_version(admin.adapters(str(admin.tenant(tenant)["id"])), version)["id"])


def _show_outcomes(told: Json, done: str, *, as_json: bool) -> None:
    if as_json:
        print_json(told)
    elif not told["replicas"]:
        typer.echo("There is no replica to tell; the worker tells those that come.")
    for replica in told["replicas"]:
        # One refusal among others is no error of the API.
        is_done = replica["refusal"] is None
        if not as_json:
            words = done if is_done else replica["message"] or replica["refusal"]
            typer.echo(f"{replica['replica_id']}: {words}", err=not is_done)
    if any(replica["refusal"] is not None for replica in told["replicas"]):
        raise typer.Exit(1)
