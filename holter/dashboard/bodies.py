"""Answers as bytes: strict JSON and files, packed once however many ask for them."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from holter.summary import as_json

_WORTH_PACKING = 1000  # bytes


@dataclass(frozen=True)
class Body:
    kind: str
    plain: bytes
    packed: bytes | None
    tag: str


def body(plain: bytes, kind: str, level: int = 1) -> Body:
    packed = gzip.compress(plain, level, mtime=0) if len(plain) >= _WORTH_PACKING else None
    return Body(kind, plain, packed, f'"{hashlib.sha256(plain).hexdigest()[:32]}"')


def json_body(value: Any) -> Body:
    return body(strict_json(value).encode("ascii"), "application/json")


def strict_json(value: Any) -> str:
    """Whatever is no finite number is null. ASCII only: a name may hold halves of characters, which no UTF-8 has."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(as_json(value), allow_nan=False, separators=(",", ":"))


def answer(request: Request, found: Body, *, keep: bool = False, status: int = 200) -> Response:
    """`keep` lets a browser keep it and ask whether it is still the same."""
    headers = {"vary": "Accept-Encoding"}
    if keep:
        headers |= {"etag": found.tag, "cache-control": "private, no-cache"}
        if found.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
    if found.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(found.packed, status, headers, found.kind)
    return Response(found.plain, status, headers, found.kind)


def complaint(request: Request, status: int, words: str) -> Response:
    return answer(request, json_body({"error": words}), status=status)
