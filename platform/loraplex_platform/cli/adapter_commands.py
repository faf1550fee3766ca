"""`loraplex adapters`: upload, import, list, deploy, retire, merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    TenantOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonOption, moment_of, print_json, print_rows
from loraplex_platform.cli.process_commands import exec_module

IMPORT_POLL_S = 0.5

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="LoRA adapters of tenants.")

FolderArgument = Annotated[
    Path, typer.Argument(help="PEFT folder: adapter_config.json, adapter_model.safetensors.")
]
ProbeOption = Annotated[
    bool,
    typer.Option(
        "--probe/--no-probe",
        help="Ask it some questions beside the base, or only check its files: many times faster.",
    ),
]


@app.command()
def upload(
    folder: FolderArgument,
    tenant: TenantOption,
    name: Annotated[
        str | None, typer.Option(show_default="the folder's", help="Name of the adapter.")
    ] = None,
    deploy_as: Annotated[
        str | None, typer.Option("--deploy", help="Deploy it at once under this model name.")
    ] = None,
    is_probed: ProbeOption = True,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Upload an adapter, have it checked and tried, and show the report.

    The same content again gives the same version. After Ctrl-C or a lost connection the same command goes
    on where it was cut.

    Example:

      loraplex adapters upload examples/adapters/pirate --tenant acme --deploy pirate
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TransferSpeedColumn,
    )

    for file_name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file_name).is_file():
            raise CommandError(f"{folder} has no {file_name}: give a folder that PEFT saved")
    from loraplex_platform.resumable_upload import ResumableUpload

    # What is printed for a program is the answer alone.
    console = Console(highlight=False, stderr=as_json)
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with (
        open_admin(data_dir, control_url) as admin,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        tenant_id = admin.tenant(tenant)["id"]
        row = progress.add_task("uploading", total=None)
        checking = "checking and trying it" if is_probed else "checking it"

        def on_progress(sent_bytes: int, total_bytes: int) -> None:
            is_sent = sent_bytes >= total_bytes
            progress.update(
                row,
                completed=sent_bytes,
                total=total_bytes,
                description=checking if is_sent else "uploading",
            )

        upload = ResumableUpload(
            admin,
            tenant_id,
            name or folder.resolve().name,
            folder,
            is_probed=is_probed,
            on_progress=on_progress,
        )
        try:
            adapter = upload.run()
        except KeyboardInterrupt:
            progress.update(row, description="cut short: the same command again goes on from here")
            raise
        progress.update(row, description="checked")
        if deploy_as is not None:
            admin.deploy(tenant_id, deploy_as, adapter["version"]["id"])
    if as_json:
        print_json(adapter)
        return
    _show_report(console, adapter)
    if deploy_as is not None:
        console.print(f"Deployed: {tenant}'s model [bold]{deploy_as}[/bold] answers with it now.")


@app.command("import")
def import_adapter(
    name: Annotated[
        str, typer.Argument(help="Name of the adapter; an existing one gets a version.")
    ],
    source: Annotated[
        str,
        typer.Argument(
            help="hf://organisation/name@revision, s3://bucket/folder, gs://bucket/folder, or file:///folder of "
            "the server."
        ),
    ],
    tenant: TenantOption,
    is_probed: ProbeOption = True,
    is_waiting: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Stay until it has ended.")
    ] = True,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Have the server fetch an adapter from a place that its operator allows (LORAPLEX_IMPORT_SOURCES).

    It is a job of the server's: Ctrl-C ends the waiting, not the import.

    Example:

      loraplex adapters import capitals hf://acme/capitals-lora@main --tenant acme
    """
    import time

    from rich.console import Console

    console = Console(highlight=False, stderr=as_json)
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        job = admin.begin_import(tenant_id, name, source, is_probed=is_probed)
        with console.status("queued") as status:
            while is_waiting and job["state"] in ("queued", "running"):
                time.sleep(IMPORT_POLL_S)
                job = admin.get_import(tenant_id, job["id"])
                status.update(_progress_of(job))
        version = None
        if job["state"] == "succeeded":
            version = find_version(admin.adapters(tenant_id), job["version_id"])
    if as_json:
        print_json(job)
    elif version is not None:
        _show_report(console, {"name": name, "version": version})
    elif job["state"] != "failed":
        console.print(f"{job['id']} is {job['state']}: loraplex adapters imports --tenant {tenant}")
    if job["state"] == "failed":
        raise CommandError(f"the import failed: {job['error']['message']}")


@app.command("imports")
def list_imports(
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List a tenant's imports, newest first, and how far they are.

    Example:

      loraplex adapters imports --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        jobs = admin.imports(admin.tenant(tenant)["id"])
    if as_json:
        print_json(jobs)
        return
    if not jobs:
        typer.echo(f"{tenant} has no imports: loraplex adapters import NAME SOURCE -t {tenant}")
        return
    rows = [
        (
            job["id"],
            job["name"],
            job["resolved"] or job["source"],
            _progress_of(job),
            job["version_id"] or (job["error"] or {}).get("message"),
        )
        for job in jobs
    ]
    print_rows([("IMPORT", "ADAPTER", "SOURCE", "STATE", "VERSION OR REASON"), *rows])


@app.command("list")
def list_adapters(
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List a tenant's adapters, their versions and where each is deployed.

    Example:

      loraplex adapters list --tenant acme
    """
    from rich.console import Console
    from rich.table import Table

    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        adapters = admin.adapters(tenant_id)
        deployments = admin.deployments(tenant_id)
    if as_json:
        print_json({"adapters": adapters, "deployments": deployments})
        return
    console = Console(highlight=False)
    if not adapters:
        console.print(f"{tenant} has no adapters yet: loraplex adapters upload FOLDER -t {tenant}")
        return
    table = Table("adapter", "version", "id", "rank", "size", "status", "deployed as")
    for adapter in adapters:
        for version in adapter["versions"]:
            models = [
                item["name"]
                for item in deployments
                if item["revision"]["version_id"] == version["id"]
            ]
            table.add_row(
                adapter["name"],
                str(version["version"]),
                version["id"],
                str(version["rank"]),
                f"{version['size_bytes'] / 1e6:.1f} MB",
                version["status"],
                ", ".join(models) or "-",
            )
    console.print(table)


@app.command()
def deploy(
    model: Annotated[str, typer.Argument(help="The name that clients will use as the model.")],
    tenant: TenantOption,
    version: Annotated[
        str | None,
        typer.Option(
            help="A version's id (ver_...), or ADAPTER for its newest, or ADAPTER:NUMBER."
        ),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Answer with the base model.")] = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Let a model name answer with a version, from the next request on. What else it is set to, stays:
    `loraplex deployments set` changes it.

    Examples:

      loraplex adapters deploy support --tenant acme --version pirate

      loraplex adapters deploy support --tenant acme --version pirate:1

      loraplex adapters deploy support --tenant acme --base
    """
    if (version is None) is not base:
        raise CommandError("give either --version or --base")
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        version_id = None
        if version is not None:
            version_id = str(find_version(admin.adapters(tenant_id), version)["id"])
        deployment = admin.deploy(tenant_id, model, version_id)
    revision = deployment["revision"]
    what = "the base model" if version_id is None else f"{revision['adapter_name']} ({version_id})"
    typer.echo(f"{tenant}'s {model} is now {what}, revision {revision['number']}")


VersionArgument = Annotated[
    str,
    typer.Argument(help="A version's id (ver_...), or ADAPTER for its newest, or ADAPTER:NUMBER."),
]


@app.command()
def uses(
    version: VersionArgument,
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List what names a version: it is not retired before that is gone.

    Example:

      loraplex adapters uses pirate:1 --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        path = _version_path(tenant_id, find_version(admin.adapters(tenant_id), version))
        found = admin.call("GET", f"{path}/uses")
    if as_json:
        print_json(found)
    elif not found["uses"]:
        typer.echo("Nothing names it.")
    else:
        rows = [(use["kind"], use["name"], use["id"]) for use in found["uses"]]
        print_rows([("NAMED BY", "NAME", "ID"), *rows])


@app.command()
def retire(
    version: VersionArgument,
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Have nothing use a version any more. Refused while something names it; its files stay.

    Example:

      loraplex adapters retire pirate:1 --tenant acme
    """
    _set_status(version, tenant, data_dir, control_url, "retire", as_json=as_json)


@app.command()
def unretire(
    version: VersionArgument,
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Let a retired version be used again.

    Example:

      loraplex adapters unretire pirate:1 --tenant acme
    """
    _set_status(version, tenant, data_dir, control_url, "unretire", as_json=as_json)


@app.command()
def merge(
    folder: FolderArgument,
    model: Annotated[str, typer.Option(help="The base: a folder, or what `models pull` takes.")],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace it if it is a model folder.")
    ] = False,
) -> None:
    """Merge an adapter into a base model of its own, to be served as any base.

    Example:

      loraplex adapters merge examples/adapters/pirate --model smollm2-135m --out pirate-135m
    """
    arguments = [str(folder), "--model", model, "--out", str(out)]
    exec_module("loraplex_engine.merge", [*arguments, *(["--force"] if force else [])])


@app.command()
def show(
    adapter: Annotated[str, typer.Argument(help="Name or id (adp_...) of the adapter.")],
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show an adapter with the report of its newest version.

    Example:

      loraplex adapters show support --tenant acme
    """
    from rich.console import Console

    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        for listed in admin.adapters(tenant_id):
            if adapter in (listed["id"], listed["name"]):
                break
        else:
            raise CommandError(f"there is no adapter {adapter}: see `loraplex adapters list`")
        found = admin.call("GET", f"/tenants/{tenant_id}/adapters/{listed['id']}")
    if as_json:
        print_json(found)
        return
    newest = max(found["versions"], key=lambda version: int(version["version"]))
    _show_report(Console(highlight=False), found | {"version": newest})


@app.command()
def uploads(
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List a tenant's uploads, newest first; one that is open takes room until it is abandoned.

    Example:

      loraplex adapters uploads --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        found = list(admin.pages(f"/tenants/{tenant_id}/adapter-uploads"))
    if as_json:
        print_json(found)
        return
    rows = [(u["id"], u["name"], u["state"], moment_of(u["expires_at"])) for u in found]
    print_rows([("UPLOAD", "NAME", "STATE", "UNTIL"), *rows])


@app.command()
def abandon(
    upload: Annotated[str, typer.Argument(help="Its id, see `loraplex adapters uploads`.")],
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Throw away what has come of an upload that will not be ended.

    Example:

      loraplex adapters abandon upl_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        admin.call("DELETE", f"/tenants/{tenant_id}/adapter-uploads/{upload}")
    typer.echo(f"abandoned {upload}")


def _set_status(
    version: str,
    tenant: str,
    data_dir: Path,
    control_url: str | None,
    verb: str,
    *,
    as_json: bool,
) -> None:
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        path = _version_path(tenant_id, find_version(admin.adapters(tenant_id), version))
        changed = admin.call("POST", f"{path}/{verb}")
    if as_json:
        print_json(changed)
    else:
        typer.echo(f"{changed['id']} is {changed['status']}")


def _version_path(tenant_id: str, version: dict[str, Any]) -> str:
    return f"/tenants/{tenant_id}/adapters/{version['adapter_id']}/versions/{version['id']}"


def _progress_of(job: dict[str, Any]) -> str:
    if job["state"] == "running" and job["total_bytes"]:
        total, received = job["total_bytes"] / 1e6, job["received_bytes"] / 1e6
        done = "checking it" if received >= total else f"{received:.1f} of {total:.1f} MB"
        return f"running: {done}"
    if job["state"] == "queued" and job["error"] is not None:
        return f"tried {job['attempts']} times, waiting: {job['error']['message']}"
    return str(job["state"])


def find_version(adapters: list[dict[str, Any]], wanted: str) -> dict[str, Any]:
    """By id, ADAPTER (its newest) or ADAPTER:NUMBER.

    Raises:
        CommandError: there is none.
    """
    name, _, number = wanted.partition(":")
    for adapter in adapters:
        for version in sorted(adapter["versions"], key=lambda item: -int(item["version"])):
            is_named = adapter["name"] == name and number in {"", str(version["version"])}
            if version["id"] == wanted or is_named:
                return dict(version)
    raise CommandError(f"there is no version {wanted}: see `loraplex adapters list`")


def _cost_lines(report: dict[str, Any]) -> list[str]:
    """Memory and time that it will cost, as estimated."""
    memory, overhead = report.get("memory"), report.get("overhead")
    lines = []
    if memory is not None:
        least, most = (size / 1e6 for size in memory["cpu_bytes"]["bfloat16"])
        host, slot = (memory[f"gpu_{part}_bytes"]["bfloat16"] / 1e6 for part in ("host", "slot"))
        ranks = sorted({module["rank"] for module in memory["modules"]})
        shown = "/".join(map(str, ranks))
        lines.append(
            f"memory (bfloat16, estimated; rank {shown}): {least:.1f} to {most:.1f} MB on a CPU; with a GPU "
            f"{host:.1f} MB of the host's, in slots of {slot:.1f} MB"
        )
    if overhead is not None:
        lines.append(
            f"overhead (estimated): {overhead['low_percent']:.1f} to {overhead['high_percent']:.1f}% of a decoding "
            "step of one row, once for all rows that use it"
        )
    return lines


def _show_report(console: Any, adapter: dict[str, Any]) -> None:  # noqa: ANN401 - rich is imported late
    from rich.markup import escape
    from rich.table import Table

    version = adapter["version"]
    report = version.get("report") or {}
    console.print(
        f"[bold]{escape(adapter['name'])}[/bold] version {version['version']} is {version['status']}: "
        f"{version['id']}, rank {version['rank']}, {version['size_bytes'] / 1e6:.1f} MB"
    )
    for check in report.get("checks", []):
        mark = "[green]✓[/green]" if check["ok"] else "[red]✗[/red]"
        console.print(f"  {mark} {escape(check['name'])}  {escape(str(check.get('detail') or ''))}")
    for line in _cost_lines(report):
        console.print(f"  {line}")
    if report.get("source"):
        console.print(f"  imported from {escape(report['source'])}")
    probe = report.get("probe")
    if probe is None:
        console.print("  It was not asked anything.")
    samples = (probe or {}).get("samples", [])
    if samples:
        table = Table("prompt", "base", "adapter", show_lines=True)
        for sample in samples:
            table.add_row(*(escape(str(sample[key])) for key in ("prompt", "base", "adapter")))
        console.print(table)
