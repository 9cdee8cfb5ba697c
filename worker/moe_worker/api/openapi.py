"""The OpenAPI document of the public API: what `openai` reads, and what `replies` writes.

Requests come from the models that check them, so the document can not promise another field.
Answers are written down here once and held against real ones by the tests.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from moe_worker.api.openai import ChatRequest, CompletionRequest

REF = "#/components/schemas/{model}"
Schema = dict[str, Any]


def openapi_document() -> Schema:
    """OpenAPI 3.1, as JSON."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "moe-worker",
            "version": "v1",
            "description": "OpenAI's completions and chat completions, as one worker serves them.",
        },
        "paths": {
            "/v1/models": {"get": _operation("listModels", _ref("ModelList"))},
            "/v1/models/{model}": {
                "get": _operation("getModel", _ref("Model"), parameters=[_path("model")])
            },
            "/v1/completions": {"post": _generation("complete", "CompletionRequest", "Completion")},
            "/v1/chat/completions": {"post": _generation("chat", "ChatRequest", "Chat")},
            "/v1/requests/{request_id}": {
                "delete": _operation("cancel", _ref("Cancelled"), parameters=[_path("request_id")])
            },
        },
        "components": {
            "schemas": {**_requests(), **_answers()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _requests() -> Schema:
    """With all models that they are made of."""
    kinds: list[Any] = [(CompletionRequest, "validation"), (ChatRequest, "validation")]
    _, schemas = models_json_schema(kinds, by_alias=True, ref_template=REF)
    found: Schema = schemas["$defs"]
    return found


def _answers() -> Schema:
    text: Schema = {"type": "string"}
    count: Schema = {"type": "integer", "minimum": 0}
    number: Schema = {"type": "number"}
    reason: Schema = {"enum": ["stop", "length", "tool_calls"]}
    usage = _object(
        prompt_tokens=count,
        completion_tokens=count,
        total_tokens=count,
        prompt_tokens_details=_object(cached_tokens=count),
    )
    called = _object(name=text, arguments=text)
    call = _object(id=text, type={"const": "function"}, function=called)
    message = _object(role={"const": "assistant"}, content=_or_null(text), tool_calls=_list(call))
    message["required"].remove("tool_calls")
    judged: Schema = {"token": text, "logprob": number, "bytes": _list(count)}
    content = _list(_object(**judged, top_logprobs=_list(_object(**judged))))
    chat_logprobs = _object(content=content, refusal={"type": "null"})
    alternatives = _or_null({"type": "object", "additionalProperties": number})
    text_logprobs = _object(
        tokens=_list(text),
        token_logprobs=_list(_or_null(number)),
        top_logprobs=_list(alternatives),
        text_offset=_list(count),
    )
    head: Schema = {"id": text, "created": count, "model": text}
    model: Schema = {"id": text, "object": {"const": "model"}, "created": count, "owned_by": text}
    error = _object(message=text, type=text, param=_or_null(text), code=_or_null(text))
    choice: Schema = {"index": count, "finish_reason": reason}
    chat = _object(**choice, message=message, logprobs=_or_null(chat_logprobs))
    completion = _object(**choice, text=text, logprobs=_or_null(text_logprobs))
    return {
        "Error": _object(error=error),
        "Model": _object(**model, max_model_len=count),
        "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
        "Cancelled": _object(id=text, object={"const": "request"}, cancelled={"const": True}),
        "Chat": _object(
            **head, object={"const": "chat.completion"}, choices=_list(chat), usage=usage
        ),
        "Completion": _object(
            **head, object={"const": "text_completion"}, choices=_list(completion), usage=usage
        ),
    }


def _generation(operation_id: str, request: str, answer: str) -> Schema:
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    operation = _operation(operation_id, _ref(answer), requestBody=body)
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    event["description"] = "Data of an event: a chunk as JSON; of the last one: [DONE]."
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": event}
    return operation


def _operation(operation_id: str, answer: Schema, **more: Any) -> Schema:
    """Every refusal and every failure has the same shape."""
    return {
        "operationId": operation_id,
        **more,
        "responses": {
            "200": {"description": "The answer", "content": _json(answer)},
            "4XX": {"description": "Refused; says which field and why", "content": _error()},
            "503": {"description": "Takes no requests now", "content": _error()},
        },
    }


def _path(name: str) -> Schema:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _error() -> Schema:
    return _json(_ref("Error"))


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(model=name)}


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
