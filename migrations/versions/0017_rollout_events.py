"""Whoever listens is told what happens to a rollout: events leave through the outbox.

Revision: 0017, after 0016.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

# A trigger, for a tenant's member may not write to the outbox, and so that no event is forgotten. A look's
# verdict and the course of evals are read where the rollout is; the rest is news.
UP = """
CREATE FUNCTION loraplex_tell_of_rollout() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        told jsonb;
        of_rollout text := 'rol_' || replace(NEW.rollout_id::text, '-', '');
    BEGIN
        SELECT jsonb_build_object(
                'kind', 'rollout_' || NEW.kind, 'rollout_id', of_rollout, 'seq', NEW.seq,
                'deployment', d.public_name, 'state', r.state, 'step', r.step,
                'actor', NEW.actor, 'message', NEW.message)
                || CASE WHEN NEW.tenant_id IS NULL THEN '{}'::jsonb
                    ELSE jsonb_build_object('tenant_id', NEW.tenant_id) END
            INTO told
            FROM rollouts r JOIN deployments d ON d.id = r.deployment_id WHERE r.id = NEW.rollout_id;
        INSERT INTO outbox (topic, dedupe_key, payload)
            SELECT topic, 'rollout:' || of_rollout || ':' || NEW.seq, told
            FROM (VALUES ('rollout'), ('alert')) AS t (topic)
            WHERE topic = 'rollout'
                OR NEW.kind = 'hold' OR (NEW.kind = 'aborted' AND NEW.actor = 'system')
            ON CONFLICT DO NOTHING;
        RETURN NULL;
    END
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_tell_of_rollout() FROM PUBLIC;
CREATE TRIGGER tr_rollout_events_tell AFTER INSERT ON rollout_events
    FOR EACH ROW WHEN (NEW.kind NOT IN ('created', 'changed', 'verdict', 'eval'))
    EXECUTE FUNCTION loraplex_tell_of_rollout();
"""

DOWN = """
DROP TRIGGER tr_rollout_events_tell ON rollout_events;
DROP FUNCTION loraplex_tell_of_rollout();
"""


def upgrade() -> None:
    run_sql(UP)


def downgrade() -> None:
    run_sql(DOWN)
