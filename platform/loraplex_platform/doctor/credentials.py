"""Checks of the secrets: there, strong, each its own, not those of another installation, closed to others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from loraplex_platform.doctor.findings import (
    Catalogue,
    Finding,
    NotLookedAtError,
    Status,
    fail,
    ok,
    warn,
)
from loraplex_platform.doctor.look import Look
from loraplex_platform.local.data_dir import read_json
from loraplex_platform.local.errors import SettingError
from loraplex_platform.variables import MIN_SECRET_CHARS, SECRETS_DIR

catalogue = Catalogue()

_MAKE: Final = 'python3 -c "import secrets; print(secrets.token_urlsafe(32))"'
SECRETS: Final = (
    "LORAPLEX_KEY_PEPPER",
    "LORAPLEX_SALT_KEY",
    "LORAPLEX_SESSION_KEY",
    "LORAPLEX_WEBHOOK_KEY",
)
_ALL: Final = (*SECRETS, "LORAPLEX_ADMIN_KEY")
# Enough for any one process; who asks which of them is in compose.yaml.
_MIN_DIFFERENT: Final = 8


def _given(look: Look) -> dict[str, str]:
    found = {name: value for name in _ALL if (value := look.get(name)) is not None}
    if not found:
        raise NotLookedAtError(
            "`loraplex up` makes them at its first start"
            if look.is_local
            else "no secret is set here: run doctor with the environment of gateway or control"
        )
    return found


@catalogue.check("secrets.present", "no secret is missing")
async def present(look: Look) -> Finding:
    if look.is_local:
        try:
            content = read_json(look.data_dir.secrets_file)
        except SettingError as error:
            return fail(str(error), f"restore {look.data_dir.secrets_file} from a backup")
        if content is not None and not _is_any_known(look):
            return fail(
                f"{look.data_dir.secrets_file} holds none of them", "restore it from a backup"
            )
    given = _given(look)
    missing = [name for name in _ALL if name not in given]
    if not missing:
        return ok(f"all {len(given)}")
    if look.is_local:
        return fail(
            f"{look.data_dir.secrets_file} lacks {', '.join(missing)}", "restore it from a backup"
        )
    # No process has all of them, so that a container's environment lacks some by design.
    if missing == ["LORAPLEX_WEBHOOK_KEY"]:
        return warn(
            "LORAPLEX_WEBHOOK_KEY is not set: there can be no webhooks", f"set it to {_MAKE}"
        )
    if "LORAPLEX_KEY_PEPPER" in given:
        return ok(f"{', '.join(given)} (other processes have {', '.join(missing)})")
    return warn(f"{', '.join(missing)} not set here", f"set each to {_MAKE}")


@catalogue.check("secrets.strong", "every secret is long and random")
async def strong(look: Look) -> Finding:
    given = _given(look)
    weak = [
        name
        for name in SECRETS
        if name in given
        and (len(given[name]) < MIN_SECRET_CHARS or len(set(given[name])) < _MIN_DIFFERENT)
    ]
    admin = given.get("LORAPLEX_ADMIN_KEY")
    if admin is not None:
        from loraplex_platform.tenancy.keys import MalformedKeyError, parse

        try:
            kind = parse(admin).kind
        except MalformedKeyError:
            return fail(
                "LORAPLEX_ADMIN_KEY is no key (lpx_ak_...), or not whole",
                "loraplex keys mint-admin",
            )
        if kind != "ak":
            return fail("LORAPLEX_ADMIN_KEY is a tenant's key", "loraplex keys mint-admin")
    if weak:
        return fail(
            f"{', '.join(weak)}: shorter than {MIN_SECRET_CHARS} characters, or hardly any different ones",
            _MAKE,
        )
    return ok(f"{len(given)} looked at")


@catalogue.check("secrets.distinct", "no two secrets are one")
async def distinct(look: Look) -> Finding:
    by_value: dict[str, list[str]] = {}
    for name, value in _given(look).items():
        by_value.setdefault(value, []).append(name)
    same = [names for names in by_value.values() if len(names) > 1]
    if same:
        return fail(
            f"{' = '.join(same[0])}: who learns one has the other",
            f"{_MAKE}, for {same[0][-1]} (keep LORAPLEX_KEY_PEPPER: all keys hang on it)",
        )
    return ok("all different")


@catalogue.check("secrets.own", "they are not those of a local fleet, nor anybody's example")
async def own(look: Look) -> Finding:
    given = _given(look)
    example = [name for name, value in given.items() if _is_example(value)]
    if example:
        return fail(f"{', '.join(example)} look like an example's", _MAKE)
    if look.is_local:
        return ok("of this data directory")
    try:
        local = read_json(look.data_dir.secrets_file) or {}
    except SettingError:
        local = {}
    shared = [name for name, value in given.items() if value in {str(x) for x in local.values()}]
    if shared:
        return fail(
            f"{', '.join(shared)} are those of the local fleet on {look.data_dir.root}: who has a copy of that"
            " folder has production",
            f"{_MAKE}, for each; a new LORAPLEX_KEY_PEPPER needs new API keys",
        )
    return ok("not in " + str(look.data_dir.secrets_file))


def _is_any_known(look: Look) -> bool:
    return any(look.get(name) for name in _ALL)


def _is_example(value: str) -> bool:
    text = value.lower()
    return any(word in text for word in ("changeme", "change-me", "example", "secret", "password"))


@catalogue.check("secrets.closed", "nobody else can read them")
async def closed(look: Look) -> Finding:
    open_to_others = []
    candidates = [look.data_dir.secrets_file, look.data_dir.demo_file]
    folder = look.get(SECRETS_DIR)
    for path in candidates:
        if path.is_file() and path.stat().st_mode & 0o077:
            open_to_others.append(path)
    if open_to_others:
        paths = " ".join(str(path) for path in open_to_others)
        return fail(f"others may read {paths}", f"chmod 600 {paths}")
    if folder:
        finding = judge_folder(Path(folder))
        if finding.status is not Status.OK or not look.is_local:
            return finding
    if look.is_local:
        _given(look)  # nothing to close where there is none
        return ok(f"{look.data_dir.secrets_file} is its owner's only")
    return ok("in the environment, which the owner of a process can read, and nobody else")


def judge_folder(folder: Path) -> Finding:
    """Whether only those whom they are given to read and write the files of LORAPLEX_SECRETS_DIR.

    Files that all may read are as they should be in a folder that nobody else enters (`loraplex secrets make`), and
    on a read-only mount, where a container sees nothing but its own.
    """
    if not folder.is_dir():
        return fail(f"{SECRETS_DIR} is {folder}: there is no such folder", "loraplex secrets make")
    mode = folder.stat().st_mode
    if mode & 0o022 and not _is_read_only(folder):
        return fail(f"others may put files into {folder}", f"chmod 700 {folder}")
    if not mode & 0o077:
        return ok(f"{folder} is its owner's only")
    open_to_others = []
    paths = [path for path in sorted(folder.glob("loraplex_*")) if path.is_file()]
    for path in paths:
        of_others = path.stat().st_mode & 0o026  # all may read it; its group or all may write it
        if of_others and not _is_read_only(path):
            open_to_others.append(path)
    if open_to_others:
        names = ", ".join(path.name for path in open_to_others)
        return fail(f"others may read or write {names} in {folder}", f"chmod 700 {folder}")
    return ok(f"{len(paths)} files in {folder}, closed to others or on a read-only mount")


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
