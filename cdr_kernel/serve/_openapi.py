"""The OpenAPI document: of the same structs that read and write the bodies."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cdr_kernel.serve import _schema
from cdr_kernel.serve._errors import ErrorBody
from cdr_kernel.serve._idempotency import HEADER as IDEMPOTENCY_KEY
from cdr_kernel.serve._middleware import DEADLINE
from cdr_kernel.serve._operations import CRP_HEADERS, OPERATIONS, Operation

REFUSALS = {
    "400": "the body is no JSON or msgpack",
    "401": "no key, or one that is not known",
    "404": "there is no such thing, or it is another's",
    "408": "the head or the body did not come in time",
    "409": "another embedding model, an id that is taken, or another window of a session that has ended",
    "413": "the body is too large, or lists too many names",
    "415": "a body of another type",
    "421": "Host is not a name of this server",
    "422": "bad input: error.field, error.expected and error.got say what",
    "429": "too much at once; see Retry-After",
    "431": "the head is too large",
    "500": "a fault of the server, a damaged file of the store, or an I/O error",
    "507": "the disk is full; nothing was changed",
    "503": "loading, draining, too many connections, or the session store cannot be reached; see Retry-After",
    "504": "the deadline passed; nothing was changed",
}


def document(version: str, *, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1 of all operations. keys: whether they ask for one."""
    structs = [ErrorBody, _schema.Health, *(o.answer for o in OPERATIONS), *(o.body for o in OPERATIONS if o.body)]
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, keys)
    for path, summary in (("/livez", "Whether the process runs"), ("/readyz", "Whether it serves")):
        responses = {
            status: {"description": text, "content": _content("Health", (_schema.JSON,))}
            for status, text in (("200", "it does"), ("503", "it does not"))
            if path == "/readyz" or status == "200"
        }
        paths[path] = {
            "get": {"operationId": path[1:], "summary": summary, "responses": responses, "tags": ["process"]}
        }
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "cdr serve",
            "version": version,
            "description": "Coverage-Differential Retrieval over HTTP. Vectors are little-endian float32: base64 in "
            "JSON, bytes in msgpack.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        made["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return made


def _described(operation: Operation, keys: bool) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    parameters.append(_header(DEADLINE, "milliseconds this may take", {"type": "integer", "minimum": 1}))
    if operation.keyed:
        key = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"}
        parameters.append(_header(IDEMPOTENCY_KEY, "a repeat with the same key is applied once", key))
    headers: dict[str, Any] = {"X-Request-ID": {"schema": {"type": "string"}}}
    if operation.keyed:
        headers["Idempotency-Replayed"] = {"schema": {"type": "string"}}
    if operation.crp:
        headers |= {name: {"schema": {"type": "string"}} for name in CRP_HEADERS}
    both = (_schema.JSON, _schema.MSGPACK)
    responses: dict[str, Any] = {
        "200": {"description": "done", "headers": headers, "content": _content(operation.answer.__name__, both)}
    }
    for status, text in REFUSALS.items():
        if status == "401" and not keys:
            continue
        responses[status] = {"description": text, "content": _content("ErrorBody", both)}
        if status in ("429", "503"):
            responses[status]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    summary = (operation.run.__doc__ or "").strip().splitlines()[0]
    made: dict[str, Any] = {
        "operationId": operation.name,
        "summary": summary,
        "tags": [operation.path.split("/")[2]],
        "parameters": parameters,
        "responses": responses,
    }
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": _content(operation.body.__name__, both)}
    if keys:
        made["security"] = [{"bearer": []}]
    return made


def _content(name: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    return {kind: {"schema": {"$ref": f"#/components/schemas/{name}"}} for kind in kinds}


def _header(name: str, text: str, kind: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": kind}
