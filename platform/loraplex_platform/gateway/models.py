"""`GET /v1/models`: what the key may call, and nothing about anything else."""

from __future__ import annotations

from fastapi import APIRouter, Response

from loraplex_platform.gateway import openapi, queries
from loraplex_platform.gateway.context import ConfirmedCaller, ThisGateway
from loraplex_platform.gateway.openai_schemas import Model, ModelList, encode_json
from loraplex_platform.gateway.revision_choice import may_call, unknown_model
from loraplex_platform.tenancy.authentication import require_scope

router = APIRouter(prefix="/v1", tags=["Models"])


@router.get("/models", **openapi.MODEL_LIST)
async def list_models(gateway: ThisGateway, caller: ConfirmedCaller) -> Response:
    """The base model and the caller's deployments, as far as the key may call them; in a stable order."""
    require_scope(caller, "models.read")
    async with gateway.sessions() as session:
        models = await queries.list_models(session, caller.tenant_id, gateway.settings.base_model)
    # A tenant's own name wins, also where the key may not call what has it.
    served = {model.public_name: model for model in models}
    shown = {name: _shown(model) for name, model in served.items() if may_call(caller, model)}
    return _json(encode_json(ModelList(data=list(shown.values()))))


@router.get("/models/{model_id:path}", **openapi.MODEL)
async def get_model(model_id: str, gateway: ThisGateway, caller: ConfirmedCaller) -> Response:
    """One of them. Ids may hold slashes and colons."""
    require_scope(caller, "models.read")
    models: list[queries.ListedModel] = []
    if "\0" not in model_id:  # Postgres has no such text, so nothing is called that
        async with gateway.sessions() as session:
            models = await queries.list_models(
                session, caller.tenant_id, gateway.settings.base_model, model_id
            )
    # A tenant's own name wins, as in the list.
    if not models or not may_call(caller, models[-1]):
        raise unknown_model(model_id)
    return _json(encode_json(_shown(models[-1])))


def _shown(model: queries.ListedModel) -> Model:
    return Model(
        id=model.public_name, created=int(model.created_at.timestamp()), owned_by=model.owner
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
