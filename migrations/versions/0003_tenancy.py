"""Members and invitations, the life cycle of keys, and what a key may call.

Revision: 0003, after 0002. Row-level security is 0009, when all tables are there.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

PEOPLE = """
-- Most people belong to tenants; a role on the platform is the exception. Who logs in by OIDC has no
-- password here.
ALTER TABLE users ALTER COLUMN platform_role DROP NOT NULL;
ALTER TABLE users ALTER COLUMN password_hash DROP NOT NULL;
ALTER TABLE users ADD COLUMN oidc_issuer VARCHAR(255);
ALTER TABLE users ADD COLUMN oidc_subject VARCHAR(255);
-- Who accepts an invitation chooses a password without showing that the e-mail is theirs. Whom an
-- operator made, as all until now, is who the operator says.
ALTER TABLE users ADD COLUMN email_proven_at TIMESTAMP WITH TIME ZONE;
UPDATE users SET email_proven_at = created_at;
ALTER TABLE users ADD CONSTRAINT ck_users_oidc CHECK ((oidc_issuer is null) = (oidc_subject is null));
ALTER TABLE users ADD CONSTRAINT uq_users_oidc_issuer_oidc_subject UNIQUE (oidc_issuer, oidc_subject);

CREATE TABLE memberships (
    tenant_id UUID NOT NULL,
    user_id UUID NOT NULL,
    role VARCHAR(16) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    row_version INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT pk_memberships PRIMARY KEY (tenant_id, user_id),
    CONSTRAINT ck_memberships_role CHECK (role in ('owner', 'admin', 'developer', 'billing', 'viewer')),
    CONSTRAINT fk_memberships_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_memberships_user_id_users FOREIGN KEY(user_id) REFERENCES users (id)
);
CREATE INDEX ix_memberships_user_id ON memberships (user_id);

CREATE TABLE invitations (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    email VARCHAR(254) NOT NULL,
    role VARCHAR(16) NOT NULL,
    token_mac BYTEA NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    accepted_at TIMESTAMP WITH TIME ZONE,
    revoked_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_invitations PRIMARY KEY (id),
    CONSTRAINT ck_invitations_role CHECK (role in ('owner', 'admin', 'developer', 'billing', 'viewer')),
    CONSTRAINT ck_invitations_email_lower CHECK (email = lower(email)),
    CONSTRAINT ck_invitations_ended_once CHECK (accepted_at is null or revoked_at is null),
    CONSTRAINT fk_invitations_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT uq_invitations_token_mac UNIQUE (token_mac)
);
CREATE INDEX ix_invitations_tenant_id_id ON invitations (tenant_id, id);
"""

ZONES = """
-- What Postgres and everybody else mean by the same name. Abbreviations do not: of CET Postgres makes a
-- fixed offset. A zone that Postgres does not know would fail every settle of the tenant.
CREATE FUNCTION loraplex_is_zone(zone text) RETURNS boolean
    LANGUAGE sql STABLE PARALLEL SAFE
    AS $$
        SELECT zone = 'UTC' OR (
            EXISTS (SELECT FROM pg_timezone_names n WHERE n.name = zone)
            AND NOT EXISTS (SELECT FROM pg_timezone_abbrevs a WHERE a.abbrev = upper(zone)))
    $$;

CREATE FUNCTION loraplex_guard_zone() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
    BEGIN
        IF NOT loraplex_is_zone(NEW.billing_tz) THEN
            RAISE EXCEPTION 'billing_tz: % is not the name of a time zone', quote_literal(NEW.billing_tz)
                USING ERRCODE = 'check_violation', TABLE = 'tenants', COLUMN = 'billing_tz';
        END IF;
        RETURN NEW;
    END $$;

CREATE TRIGGER tenants_guard_zone BEFORE INSERT OR UPDATE OF billing_tz ON tenants
    FOR EACH ROW EXECUTE FUNCTION loraplex_guard_zone();
"""

KEYS = """
ALTER TABLE api_keys ADD COLUMN owner_user_id UUID;
ALTER TABLE api_keys ADD CONSTRAINT fk_api_keys_owner_user_id_users
    FOREIGN KEY (owner_user_id) REFERENCES users (id);
ALTER TABLE api_keys ADD COLUMN scopes VARCHAR(32)[] DEFAULT '{inference,models.read}' NOT NULL;
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_scopes CHECK (cardinality(scopes) > 0);
ALTER TABLE api_keys ADD COLUMN ip_allow CIDR[] DEFAULT '{}' NOT NULL;
ALTER TABLE api_keys ADD COLUMN created_by VARCHAR(64);
ALTER TABLE api_keys ADD COLUMN revoke_reason VARCHAR(200);
ALTER TABLE api_keys DROP CONSTRAINT ck_api_keys_status;
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_status
    CHECK (status in ('active', 'disabled', 'revoked'));
-- Lists are ordered by id, which is time; no query wants this one.
DROP INDEX ix_api_keys_tenant_id_created_at_id;
CREATE INDEX ix_api_keys_tenant_id_project_id_id ON api_keys (tenant_id, project_id, id);
CREATE INDEX ix_api_keys_tenant_id_id_active ON api_keys (tenant_id, id) WHERE status = 'active';

CREATE TABLE key_model_grants (
    key_id UUID NOT NULL,
    target_kind VARCHAR(16) NOT NULL,
    target_id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    CONSTRAINT pk_key_model_grants PRIMARY KEY (key_id, target_kind, target_id),
    CONSTRAINT ck_key_model_grants_target_kind CHECK (target_kind in ('base', 'adapter', 'deployment')),
    CONSTRAINT fk_key_model_grants_own_key FOREIGN KEY(tenant_id, key_id) REFERENCES api_keys (tenant_id, id)
);

GRANT SELECT, INSERT, UPDATE, DELETE ON memberships, key_model_grants TO loraplex_app;
GRANT SELECT, INSERT, UPDATE ON invitations TO loraplex_app;
"""

# Down: whoever has no platform role or no password cannot exist any more; a disabled key is over.
DROP = """
DROP TRIGGER tenants_guard_zone ON tenants;
DROP FUNCTION loraplex_guard_zone();
DROP FUNCTION loraplex_is_zone(text);
DROP TABLE key_model_grants;
DROP INDEX ix_api_keys_tenant_id_id_active;
DROP INDEX ix_api_keys_tenant_id_project_id_id;
CREATE INDEX ix_api_keys_tenant_id_created_at_id ON api_keys (tenant_id, created_at, id);
UPDATE api_keys SET status = 'revoked', revoked_at = now() WHERE status = 'disabled';
ALTER TABLE api_keys DROP CONSTRAINT ck_api_keys_status;
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_status CHECK (status in ('active', 'revoked'));
ALTER TABLE api_keys DROP COLUMN revoke_reason;
ALTER TABLE api_keys DROP COLUMN created_by;
ALTER TABLE api_keys DROP COLUMN ip_allow;
ALTER TABLE api_keys DROP COLUMN scopes;
ALTER TABLE api_keys DROP COLUMN owner_user_id;
DROP TABLE invitations, memberships;
DELETE FROM sessions USING users
    WHERE users.id = user_id AND (platform_role IS NULL OR password_hash IS NULL);
DELETE FROM users WHERE platform_role IS NULL OR password_hash IS NULL;
ALTER TABLE users DROP CONSTRAINT uq_users_oidc_issuer_oidc_subject;
ALTER TABLE users DROP CONSTRAINT ck_users_oidc;
ALTER TABLE users DROP COLUMN email_proven_at;
ALTER TABLE users DROP COLUMN oidc_subject;
ALTER TABLE users DROP COLUMN oidc_issuer;
ALTER TABLE users ALTER COLUMN password_hash SET NOT NULL;
ALTER TABLE users ALTER COLUMN platform_role SET NOT NULL;
"""


def upgrade() -> None:
    run_sql(PEOPLE, ZONES, KEYS)


def downgrade() -> None:
    run_sql(DROP)
