"""Checks of what is beside Postgres: Redis, the adapter store, the base model's folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

from loraplex_platform.doctor.findings import Catalogue, Finding, NotLookedAtError, fail, ok, warn
from loraplex_platform.doctor.look import Look

catalogue = Catalogue()

OLDEST_REDIS: Final = (6, 2)


async def _redis_info(look: Look) -> dict[str, Any]:
    """INFO and what of CONFIG matters.

    Raises:
        NotLookedAtError: it is not configured, or does not answer.
    """
    from redis.exceptions import RedisError

    client = look.redis()
    try:
        return dict(await client.info())
    except (RedisError, OSError) as error:
        raise NotLookedAtError(
            f"{str(error) or type(error).__name__}: see redis.reachable"
        ) from error
    finally:
        await client.aclose()


@catalogue.check("redis.reachable", "Redis answers")
async def redis_reachable(look: Look) -> Finding:
    look.needed("LORAPLEX_REDIS_URL")
    try:
        info = await _redis_info(look)
    except NotLookedAtError as error:
        return fail(
            str(error).removesuffix(": see redis.reachable"),
            "start Redis, or mend LORAPLEX_REDIS_URL (redis://:password@host:6379/0). Meanwhile each gateway"
            " enforces its own part of the rates, and engines are found through Postgres",
        )
    return ok(f"up {info['uptime_in_seconds']} s, {info['connected_clients']} clients")


@catalogue.check("redis.version", "Redis is new enough")
async def redis_version(look: Look) -> Finding:
    return judge_redis(str((await _redis_info(look))["redis_version"]))


def judge_redis(version: str) -> Finding:
    """Whether it has the commands that we use."""
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < OLDEST_REDIS:
        return fail(version, "upgrade Redis to 6.2 or newer; compose.yaml has 7")
    return ok(version)


@catalogue.check("redis.eviction", "Redis throws nothing away that counts")
async def redis_eviction(look: Look) -> Finding:
    info = await _redis_info(look)
    policy, limit = str(info["maxmemory_policy"]), int(info["maxmemory"])
    used = int(info["used_memory"])
    text = f"{policy}, {used / 2**20:.0f} MiB used" + (f" of {limit / 2**20:.0f}" if limit else "")
    if policy != "noeviction":
        return warn(
            f"{text}: under pressure it drops rates and concurrency that are being counted",
            "redis-cli config set maxmemory-policy noeviction (and in redis.conf)",
        )
    if limit and used > 0.9 * limit:
        return fail(
            f"{text}: it is about to refuse writes", "redis-cli config set maxmemory 1gb, or more"
        )
    return ok(text)


@catalogue.check("redis.persistence", "Redis saves nothing: all in it is rebuilt")
async def redis_persistence(look: Look) -> Finding:
    info = await _redis_info(look)
    failed = [
        name
        for name in ("rdb_last_bgsave_status", "aof_last_write_status")
        if str(info.get(name, "ok")) != "ok"
    ]
    if failed:
        return fail(
            f"{', '.join(failed)} failed: Redis then refuses writes",
            'redis-cli config set save "" && redis-cli config set appendonly no, or give it disk space',
        )
    if int(info.get("aof_enabled", 0)):
        return warn(
            "appendonly is on: an fsync can hold up every request's rates, and nothing is gained",
            "redis-cli config set appendonly no (and in redis.conf)",
        )
    return ok("off, or snapshots only")


@catalogue.check("store.reachable", "the adapter store can be reached and written")
async def store(look: Look) -> Finding:
    from loraplex_engine.artifact import AdapterStore, without_login

    url = look.needed("LORAPLEX_STORE_URL")
    try:
        opened = AdapterStore(url)
    except ValueError as error:
        return fail(
            str(error), "set LORAPLEX_STORE_URL to file:///folder, s3://bucket/path or gs://..."
        )
    try:
        await asyncio.to_thread(opened.check)
    except OSError as error:
        reason = f"{without_login(url)}: {error.strerror or error}"
        where = url.removeprefix("file://")
        return fail(
            reason,
            f"install -d -o loraplex -m 0700 {where}"
            if url.startswith("file:")
            else "check the bucket's name, AWS_ENDPOINT_URL and the credentials (aws s3 ls BUCKET)",
        )
    return ok(
        without_login(url) + (", written to" if url.startswith("file:") else ", bucket and login")
    )


@catalogue.check("model.files", "the base model's folder is whole")
async def model_files(look: Look) -> Finding:
    folder = look.model_dir
    pull = f"loraplex models pull {look.base_model}"
    if not folder.is_dir():
        return fail(f"there is no folder {folder}", pull)
    missing = [
        name
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
        if not (folder / name).is_file()
    ]
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        missing.append("*.safetensors")
    missing += _missing_shards(folder)
    if missing:
        return fail(f"{folder} lacks {', '.join(missing[:5])}", pull)
    try:
        num_bytes = sum(check_safetensors(path) for path in weights)
    except ValueError as error:
        return fail(str(error), f"rm -r {folder} && {pull}")
    return ok(f"{folder}: {len(weights)} weight files, {num_bytes / 2**20:,.0f} MiB")


def _missing_shards(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return [f"a readable {index.name} ({type(error).__name__})"]
    return sorted(str(name) for name in named if not (folder / str(name)).is_file())


def check_safetensors(path: Path) -> int:
    """Size of a weight file in bytes.

    Raises:
        ValueError: it is cut off, or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{path} is no whole safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            end = max(
                (tensor["data_offsets"][1] for name, tensor in header.items() if name[:2] != "__"),
                default=0,
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path}: its header cannot be read ({error})") from error
    if 8 + length + end != size:
        raise ValueError(f"{path} is {size} bytes and should be {8 + length + end}: it is cut off")
    return size


@catalogue.check("model.registered", "the folder is the model that the books know")
async def model_registered(look: Look) -> Finding:
    from sqlalchemy import select

    from loraplex_platform.db import BaseModel
    from loraplex_platform.registry.base_model import BaseModelError, read_base_model

    name = look.base_model
    async with look.database() as database, database.sessions() as session:
        statement = select(BaseModel).where(BaseModel.name == name)
        rows = (await session.scalars(statement.order_by(BaseModel.created_at.desc()))).all()
    if not rows:
        raise NotLookedAtError(f"no control API has registered {name} yet")
    try:
        facts = await asyncio.to_thread(read_base_model, look.model_dir, name)
    except BaseModelError as error:
        raise NotLookedAtError(f"{error}: see model.files") from None
    here = (facts.revision, facts.tokenizer_sha256, facts.chat_template_sha256)
    for row in rows:
        if here == (row.revision, row.tokenizer_sha256, row.chat_template_sha256):
            return ok(f"{name} {facts.revision[:19]}, tokenizer and chat template as registered")
    newest = rows[0]
    differs = [
        what
        for what, is_equal in (
            ("weights", facts.revision == newest.revision),
            ("tokenizer", facts.tokenizer_sha256 == newest.tokenizer_sha256),
            ("chat template", facts.chat_template_sha256 == newest.chat_template_sha256),
        )
        if not is_equal
    ]
    return fail(
        f"{', '.join(differs)} in {look.model_dir} differ from those registered as {name}: adapters and"
        " prompts would meet another model",
        f"rm -r {look.model_dir} && loraplex models pull {name}; or serve the other model under a name of its own",
    )
