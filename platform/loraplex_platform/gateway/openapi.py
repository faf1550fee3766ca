"""The data plane's OpenAPI page: schemas from the msgspec structs, with examples that run.

Bodies are parsed by `request_parsing.py`, not by FastAPI, so their schemas are given here.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from loraplex_platform.gateway import openai_schemas as shapes
from loraplex_platform.gateway.errors import ErrorEnvelope

_STRUCTS: Final = (
    shapes.ChatRequest,
    shapes.CompletionRequest,
    shapes.ChatCompletion,
    shapes.ChatCompletionChunk,
    shapes.Completion,
    shapes.Model,
    shapes.ModelList,
    ErrorEnvelope,
)

_EXAMPLE_ERROR: Final = {
    "error": {
        "message": "The model 'nobody' does not exist or you do not have access to it.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
        "request_id": "req_0199f0c2b7d37a5e8a1f6f1d2c3b4a59",
    }
}
_CHAT_EXAMPLES: Final[dict[str, Any]] = {
    "question": {
        "summary": "Ask an adapter",
        "value": {
            "model": "capitals",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 32,
            "temperature": 0,
        },
    },
    "stream": {
        "summary": "Stream from the base model, with usage at the end",
        "value": {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
    "choices": {
        "summary": "Three answers, drawn again the same way by the same seed",
        "value": {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Name a colour."}],
            "n": 3,
            "seed": 7,
            "temperature": 0.9,
            "min_p": 0.05,
            "frequency_penalty": 0.4,
            "max_tokens": 16,
        },
    },
}
_WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_STRUCTURE_EXAMPLES: Final[dict[str, Any]] = {
    "tools": {
        "summary": "Offer a function; the answer may call it",
        "value": {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
            "tools": [_WEATHER],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "max_tokens": 64,
        },
    },
    "named_tool": {
        "summary": "Have one function called; a grammar sees to it",
        "value": {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
            "tools": [_WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "max_tokens": 64,
        },
    },
    "tool_result": {
        "summary": "Send a call's result back",
        "value": {
            "model": "smollm2-135m",
            "messages": [
                {"role": "user", "content": "What is the weather in Rome?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 24 degrees"},
            ],
            "tools": [_WEATHER],
            "max_tokens": 64,
        },
    },
    "json_schema": {
        "summary": "An answer that follows a JSON schema",
        "value": {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Name a city and its country."}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "city",
                    "schema": {
                        "type": "object",
                        "properties": {
                            "city": {"type": "string", "maxLength": 40},
                            "country": {"type": "string", "maxLength": 40},
                        },
                        "required": ["city", "country"],
                        "additionalProperties": False,
                    },
                },
            },
            "max_tokens": 64,
        },
    },
    "one_of": {
        "summary": "An answer of one of several kinds; `oneOf` needs kinds that exclude each other",
        "value": {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Is it raining in Rome?"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": {
                        "oneOf": [
                            {
                                "type": "object",
                                "properties": {
                                    "kind": {"const": "yes_no"},
                                    "is_so": {"type": "boolean"},
                                },
                                "required": ["kind", "is_so"],
                                "additionalProperties": False,
                            },
                            {
                                "type": "object",
                                "properties": {"kind": {"const": "unknown"}},
                                "required": ["kind"],
                                "additionalProperties": False,
                            },
                        ]
                    },
                },
            },
            "max_tokens": 64,
        },
    },
    "structured_outputs": {
        "summary": "One of a few answers",
        "value": {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Is the sky blue?"}],
            "structured_outputs": {"choice": ["yes", "no"]},
            "max_tokens": 8,
        },
    },
}
_COMPLETION_EXAMPLES: Final = {
    "text": {
        "summary": "Continue a text",
        "value": {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 16},
    },
    "token_ids": {
        "summary": "Continue token ids",
        "value": {"model": "smollm2-135m", "prompt": [9906, 1917], "max_tokens": 16},
    },
    "structured_outputs": {
        "summary": "Text that a regular expression matches",
        "value": {
            "model": "smollm2-135m",
            "prompt": "The year is ",
            "structured_outputs": {"regex": "[12][0-9]{3}"},
            "max_tokens": 8,
        },
    },
}
_REASONS: Final = {
    "400": "A field is wrong or not supported; `param` names it. `request_exceeds_budget`: the request"
    " alone is larger than the whole of a quota.",
    "401": "No key, or one that is unknown, revoked or expired.",
    "403": "The tenant is suspended.",
    "404": "No such model for this key.",
    "405": "The URL does not take this method.",
    "408": "The body took too long to arrive.",
    "409": "The first request with this `Idempotency-Key` is running (try again), or has ended and"
    " was billed: `first_request` has its id and usage.",
    "413": "The body is too large.",
    "422": "The `Idempotency-Key` was used with another body.",
    "429": "A rate, concurrency or usage limit does not allow it; the message says which one, its value,"
    " its use and when it is reset. `rate_limit_exceeded`: `Retry-After` says when to retry."
    " `insufficient_quota`: `x-should-retry: false`. `too_many_attempts`: too many unknown keys came from"
    " this address.",
    "500": "The engine or the gateway failed; nothing is billed.",
    "503": "No engine is ready, or something else we need is down; `Retry-After` says when to retry.",
    "504": "The request took longer than a request may; nothing is billed.",
}
# Of several limits the tightest one; only where there is one of that kind.
_RATE_HEADERS: Final = {
    f"x-ratelimit-{name}-{kind}": {
        "description": f"{text} ({kind} a minute).",
        "required": False,
        "schema": {"type": "string" if name == "reset" else "integer"},
    }
    for kind in ("requests", "tokens")
    for name, text in (
        ("limit", "The limit"),
        ("remaining", "What is left of it"),
        ("reset", "Until nothing of it is used, as `350ms` or `1m30s`"),
    )
} | {
    "RateLimit-Policy": {
        "description": "The limits on requests a minute and at a time, of the caller's own scopes, as the "
        "IETF's draft writes them (draft-ietf-httpapi-ratelimit-headers): a list of structured fields.",
        "required": False,
        "schema": {"type": "string"},
    },
    "RateLimit": {
        "description": "How they stand: what remains (`r`), and the seconds until nothing of it is used, or, "
        "in a refusal, until a request fits (`t`).",
        "required": False,
        "schema": {"type": "string"},
    },
    "x-loraplex-rate-limits": {
        "description": "`degraded`: the limits were checked by this gateway alone.",
        "required": False,
        "schema": {"type": "string", "enum": ["degraded"]},
    },
    "x-loraplex-max-tokens": {
        "description": "What `max_tokens` was cut to, where a quota paid no more.",
        "required": False,
        "schema": {"type": "integer"},
    },
}
_REVISION_HEADERS: Final = {
    "x-loraplex-revision": {
        "description": "The deployment's revision that answered: which adapter version, engine build, system "
        "prompt and defaults.",
        "required": True,
        "schema": {"type": "string"},
    },
    "x-loraplex-arm": {
        "description": "Only while a rollout of the deployment is under way or the tenant has a pin: whether the "
        "rollout's stable or canary revision answered, or the one that the tenant's pin names. In the console's playground also "
        "`named`: the revision that was chosen there.",
        "required": False,
        "schema": {"type": "string", "enum": ["stable", "canary", "pinned", "named"]},
    },
    "x-loraplex-rollout": {
        "description": "Which rollout `x-loraplex-arm` speaks of.",
        "required": False,
        "schema": {"type": "string"},
    },
}
_BEARER: Final[list[dict[str, list[str]]]] = [{"key": []}]


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json_content(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(name)}}


def _errors(*statuses: str) -> dict[str, Any]:
    return {
        status: {
            "description": _REASONS[status],
            "content": {
                "application/json": {"schema": _ref("ErrorEnvelope"), "example": _EXAMPLE_ERROR}
            },
        }
        for status in statuses
    }


def _route(
    answer: dict[str, Any], *errors: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    headers = _RATE_HEADERS if body is None else _RATE_HEADERS | _REVISION_HEADERS
    extra: dict[str, Any] = {
        "security": _BEARER,
        "responses": {
            "200": {"description": "The answer.", "headers": headers, "content": answer},
            **_errors("401", "403", *errors, "429", "500", "503"),
        },
    }
    if body is not None:
        extra["parameters"] = [_IDEMPOTENCY_KEY, _CONVERSATION_ID]
        extra["requestBody"] = {"required": True, "content": {"application/json": body}}
    return {"response_class": Response, "openapi_extra": extra}


_COMPLETION_ERRORS = ("400", "404", "408", "409", "413", "422", "504")
_IDEMPOTENCY_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Makes a retry safe: within a day no second request with the same key (of this API"
    " key, at this endpoint) is run once the first has been billed. While the first runs, and after"
    " it, a 409 says so; after it with the first one's id and usage. A first request that cost"
    " nothing frees the key.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
}
_CONVERSATION_ID: Final = {
    "name": "x-loraplex-conversation-id",
    "in": "header",
    "required": False,
    "description": "Names the conversation that the request belongs to; it goes before"
    " `metadata.conversation_id`. In a rollout that goes by conversation all requests of one get their answers"
    " from one side. Without either, the conversation's beginning tells it apart: the first user message"
    " and the first system or developer message before it; a raw prompt goes by its API key then.",
    "schema": {"type": "string", "maxLength": shapes.MAX_SUBJECT_CHARS},
}
_FRAMES = "Frames `data: {...}`, then `data: [DONE]`; a frame with `error` if it fails midway."

CHAT: Final = _route(
    {
        **_json_content("ChatCompletion"),
        "text/event-stream": {"schema": {"type": "string", "description": _FRAMES}},
    },
    *_COMPLETION_ERRORS,
    body={"schema": _ref("ChatRequest"), "examples": {**_CHAT_EXAMPLES, **_STRUCTURE_EXAMPLES}},
)
COMPLETIONS: Final = _route(
    {
        **_json_content("Completion"),
        "text/event-stream": {"schema": {"type": "string", "description": _FRAMES}},
    },
    *_COMPLETION_ERRORS,
    body={"schema": _ref("CompletionRequest"), "examples": _COMPLETION_EXAMPLES},
)
MODEL_LIST: Final = _route(_json_content("ModelList"))
MODEL: Final = _route(_json_content("Model"), "404")


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the app."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, definitions = msgspec.json.schema_components(
            _STRUCTS, ref_template="#/components/schemas/{name}"
        )
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {}).update(definitions)
        _describe_prompt(components["schemas"])
        # What FastAPI adds for path parameters; we never answer with it.
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name, None)
        for path in schema["paths"].values():
            for operation in path.values():
                invalid = operation["responses"].get("422", {})
                if invalid.get("description") != _REASONS["422"]:  # FastAPI's own
                    operation["responses"].pop("422", None)
        components["securitySchemes"] = {
            "key": {
                "type": "http",
                "scheme": "bearer",
                "description": "A tenant's key, lpx_sk_...",
            }
        }
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_prompt(schemas: dict[str, Any]) -> None:
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    schemas["CompletionRequest"]["properties"]["prompt"] = {
        "description": "Text, token ids, or a list with exactly one of either.",
        "anyOf": [
            {"type": "string", "minLength": 1},
            ids,
            {
                "type": "array",
                "items": {"anyOf": [{"type": "string"}, ids]},
                "minItems": 1,
                "maxItems": 1,
            },
        ],
    }
