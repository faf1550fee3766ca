"""Settings of every platform process, from LORAPLEX_* environment variables.

A variable that is not set is looked for in LORAPLEX_SECRETS_DIR, as a file of its name in small letters: what a
process's environment does not hold, nobody reads there. Built once in each `main` and passed down. A missing or weak secret stops the start: local mode
(`loraplex up`) generates them into its data directory and passes them to its children.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from loraplex_engine.urls import http_fault, redis_fault
from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)

from loraplex_platform.urls import postgres_fault
from loraplex_platform.variables import MIN_SECRET_CHARS, SECRETS_DIR


def _strong(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if len(text) < MIN_SECRET_CHARS or len(set(text)) < 8:
        raise ValueError(f"must be at least {MIN_SECRET_CHARS} random characters")
    return value


def _networks(text: str) -> str:
    for part in text.split(","):
        if part.strip():
            ipaddress.ip_network(part.strip(), strict=False)  # raises what names the part
    return text


def _sound(fault_of: Callable[[str], str | None]) -> AfterValidator:
    def check(url: str | SecretStr) -> str | SecretStr:
        fault = fault_of(url if isinstance(url, str) else url.get_secret_value())
        if fault is not None:
            raise ValueError(fault)
        return url

    return AfterValidator(check)


def _store(url: str) -> str:
    from loraplex_engine.artifact import (
        AdapterStore,
    )  # only where there is a store: it takes its time

    AdapterStore(url)  # raises what says how to write it; opens nothing
    return url


ToolFormatName = Literal["auto", "hermes", "llama", "mistral"]
Secret = Annotated[SecretStr, AfterValidator(_strong)]
PostgresUrl = Annotated[SecretStr, _sound(postgres_fault)]
RedisUrl = Annotated[SecretStr, _sound(redis_fault)]
HttpUrl = Annotated[str, _sound(http_fault)]
StoreUrl = Annotated[str, AfterValidator(_store)]


class _Settings(BaseSettings):
    # What is wrong with a secret is said without it, also by whoever lets the error end the process.
    model_config = SettingsConfigDict(
        env_prefix="LORAPLEX_", frozen=True, extra="ignore", hide_input_in_errors=True
    )

    log_level: str = "info"
    log_format: str = "json"
    secrets_dir: Path | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then files."""
        del dotenv_settings, file_secret_settings
        folder = os.environ.get(SECRETS_DIR)
        if not folder:
            return init_settings, env_settings
        return init_settings, env_settings, SecretsSettingsSource(settings_cls, folder)


class DatabaseSettings(_Settings):
    """What a process needs to reach Postgres."""

    database_url: PostgresUrl
    # The non-owner role that runtime connections switch to; migrations create it.
    database_role: str | None = "loraplex_app"
    database_pool_size: int = 20

    def sqlalchemy_url(self) -> str:
        """The URL with the psycopg 3 driver named."""
        url = self.database_url.get_secret_value()
        for scheme in ("postgresql://", "postgres://"):
            if url.startswith(scheme):
                return "postgresql+psycopg://" + url.removeprefix(scheme)
        return url


class RedisSettings(_Settings):
    """Where Redis is, for those who can do without."""

    redis_url: RedisUrl | None = None


class MigrationSettings(DatabaseSettings):
    """The schema's owner, and the login that it makes for the serving processes."""

    serve_role: str | None = None  # None: an administrator makes it, or nobody
    serve_password: SecretStr | None = None  # None: the server knows them otherwise, as by peer


class ModelSettings(_Settings):
    """Where the base model's tokenizer and template are."""

    model_dir: Path
    base_model: str = "smollm2-135m"


class IssuerSettings(_Settings):
    """Who issues invoices. Without a name drafts can be made, but none is finalised."""

    issuer_name: str | None = Field(default=None, max_length=200)
    issuer_address: str = Field(default="", max_length=1000)  # lines, separated by "|"
    issuer_email: str | None = Field(default=None, max_length=254)
    issuer_tax_id: str | None = Field(default=None, max_length=64)
    issuer_payment: str | None = Field(default=None, max_length=400)  # how to pay, in words
    # Numbers are this and a count without gaps: INV-000001. Another series begins at 1.
    invoice_series: str = Field(default="INV", pattern=r"^[A-Za-z0-9][A-Za-z0-9/-]{0,19}$")


class WebhookSettings(_Settings):
    """What webhooks need of who makes them and who sends them."""

    # Their secrets are encrypted under it; None: there can be none. The old one opens what was sealed
    # before it was changed.
    webhook_key: Secret | None = None
    webhook_old_key: Secret | None = None
    # Networks of one's own that the operator's webhooks may reach, also by http: comma-separated. By
    # default, and by tenants' webhooks always, only the public internet can be reached.
    webhook_networks: Annotated[str, AfterValidator(_networks)] = ""


class FailpointSettings(_Settings):
    """Where a test lets a process fail, see gateway/failpoints.py."""

    failpoint: str | None = None
    allow_failpoints: bool = False

    @model_validator(mode="after")
    def _only_tests_fail(self) -> Self:
        if self.failpoint and not self.allow_failpoints:
            raise ValueError(
                "LORAPLEX_FAILPOINT makes this process fail, for tests: unset it (or, in a test, set"
                " LORAPLEX_ALLOW_FAILPOINTS=1)"
            )
        return self


class GatewaySettings(DatabaseSettings, ModelSettings, FailpointSettings):
    """The data plane."""

    redis_url: RedisUrl | None = None
    key_pepper: Secret
    salt_key: Secret
    gateway_host: str = "127.0.0.1"
    gateway_port: int = 8000
    # What its id begins with. The rest is made at start, for the id says whether the process that owns a
    # request is still there: another one after it must not seem to be that.
    gateway_id: str = Field(default="gw", min_length=1, max_length=48)
    max_body_bytes: int = 8 * 1024 * 1024
    header_hold_s: float = 30.0  # how long headers wait for the engine's first event
    request_timeout_s: float = 600.0
    drain_grace_s: float = 30.0
    # How long a request waits for Postgres, each of the few times that it does, before it is refused.
    database_deadline_s: float = Field(default=5.0, ge=0.1, le=15.0)
    # How long after a gateway's death its requests are settled by others, and what they hold is free.
    request_lease_s: float = Field(default=20.0, ge=1.0, le=300.0)
    # Where endings wait while Postgres is away: a folder that outlives this process. Several gateways
    # may share it. None: they wait in memory, and what a crash loses of them the sweeper settles.
    spool_dir: Path | None = None
    spool_max_bytes: int = Field(default=64 * 1024 * 1024, ge=4096)
    ping_interval_s: float = 10.0  # between comments on a stream in which nothing happens
    # How the model writes tool calls; auto: as its chat template says.
    tool_format: ToolFormatName = "auto"
    # Shadows and scorings of rollouts that this gateway has under way at a time; they wait for everybody else.
    shadow_concurrency: int = Field(default=4, ge=1, le=64)
    default_max_tokens: int = 1024  # chat without max_tokens: this, or what the context leaves
    # Who may read /metrics: comma-separated networks. A proxied request never may.
    gateway_metrics_networks: str = "127.0.0.0/8,::1/128"
    # Whose X-Forwarded-For names the client: comma-separated networks, a load balancer's above all.
    # Nobody's by default: whoever may send it chooses the address that a key's networks allow.
    gateway_trusted_proxies: str = ""
    # How long a gateway remembers a key and its limits; what changes is noticed at once through Redis,
    # and after this long without it. 0: they are read for every request.
    key_cache_s: float = Field(default=5.0, ge=0, le=5)
    curve_secret_key_file: Path | None = None


class ControlSettings(
    DatabaseSettings, ModelSettings, IssuerSettings, WebhookSettings, FailpointSettings
):
    """The admin API."""

    redis_url: RedisUrl | None = None
    key_pepper: Secret
    session_key: Secret
    admin_key: SecretStr
    # The first person who may log in: made at start, or brought in line if it differs.
    admin_email: str | None = None
    admin_password: SecretStr | None = None
    store_url: StoreUrl
    control_host: str = "127.0.0.1"
    control_port: int = 8001
    # Whose X-Forwarded-For names the visitor at login: comma-separated networks, the console's above
    # all. Nobody's by default: whoever may send it may also evade the throttle.
    control_trusted_proxies: str = ""
    gateway_url: HttpUrl = "http://127.0.0.1:8000"
    console_url: HttpUrl = "http://127.0.0.1:8501"
    session_hours: float = 12.0
    # Login through an OpenID Connect provider, beside passwords; off without an issuer. People are
    # sent back to <control_public_url>/login/oidc/callback, which the provider must know.
    oidc_issuer: HttpUrl | None = None
    oidc_client_id: str | None = None
    oidc_client_secret: SecretStr | None = None
    control_public_url: HttpUrl | None = None  # where browsers reach this API
    # Where uploads lie until they are checked; beside the adapters if the store is a folder. Several control
    # processes must share it, or a balancer must send one upload's requests to one of them.
    quarantine_dir: Path | None = None
    max_adapter_bytes: int = 512 * 1024 * 1024
    # How long a resumable upload may rest before it and its bytes are deleted, and how many of a tenant's
    # may be unfinished at once.
    upload_expiry_s: float = Field(default=86_400.0, gt=0)
    max_open_uploads: int = Field(default=16, ge=1)
    # Where adapters may be imported from: comma-separated prefixes such as hf://org/, s3://bucket/{tenant}/
    # or file:///srv/adapters/{tenant}/. Nowhere by default. See docs/operation.md for {tenant}.
    import_sources: str = ""
    import_hub_url: HttpUrl = "https://huggingface.co"
    # Hosts beside the hub's own that its downloads may be sent on to, and all of their subdomains.
    import_hub_hosts: str = "huggingface.co,hf.co"
    import_hub_token: SecretStr | None = None
    import_timeout_s: float = Field(default=900.0, gt=0)  # of one attempt's transfer
    max_adapter_rank: int = 64
    validation_timeout_s: float = 60.0
    validation_memory_bytes: int = 2 * 1024**3
    curve_secret_key_file: Path | None = None

    @model_validator(mode="after")
    def _check_oidc(self) -> Self:
        if self.oidc_issuer is None:
            return self
        for name in ("oidc_client_id", "control_public_url"):
            if getattr(self, name) is None:
                raise ValueError(f"LORAPLEX_{name.upper()} is needed with LORAPLEX_OIDC_ISSUER")
        return self


class WorkerSettings(DatabaseSettings, IssuerSettings, WebhookSettings, FailpointSettings):
    """Sweeper, journal puller, replica mirror, eval runs, rollouts."""

    redis_url: RedisUrl | None = None
    # Whose tokenizer and template eval runs need. None: this worker runs none.
    model_dir: Path | None = None
    base_model: str = "smollm2-135m"
    sweep_interval_s: float = 1.0
    journal_interval_s: float = 0.5
    lease_grace_s: float = 5.0
    rollup_interval_s: float = 2.0
    # Days after a month's end when its draft becomes a final invoice; None: somebody does it by hand.
    invoice_finalize_after_days: float | None = Field(default=None, ge=0)
    # Between two looks at a rollout that is under way; a look that takes long waits longer for the next.
    rollout_interval_s: float = Field(default=2.0, ge=0.01, le=60)
    replica_lost_after_s: float = 30.0  # how long the sweeper waits for a silent replica's journal
    worker_host: str = "127.0.0.1"
    worker_port: int = 0  # /live and /metrics; 0: any free one
    curve_secret_key_file: Path | None = None


class ConsoleSettings(_Settings):
    """How the console is started; the app itself reads only the control URL."""

    control_url: HttpUrl = "http://127.0.0.1:8001"
    console_host: str = "127.0.0.1"
    console_port: int = Field(default=8501, ge=0, le=65535)
