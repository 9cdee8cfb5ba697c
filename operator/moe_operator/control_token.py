"""The token that opens the workers' control API: of the user's Secret, or made once by us.

Neighbours: `reconcile` asks at the begin of a pass; pods mount the same Secret.
"""

from __future__ import annotations

import base64
import binascii
import secrets

from moe_operator import children
from moe_operator.context import Context
from moe_operator.desired import Desired
from moe_operator.errors import AlreadyExists
from moe_operator.observe import Recent

TOKEN_BYTES = 32
SECRET_SECONDS = 30.0
"""How old our knowledge of the Secret may be."""


def control_token(ctx: Context, wish: Desired) -> str | None:
    """The token, made if the operator is to make it; None when there is none (to be told)."""
    now = ctx.clock.monotonic()
    recent = ctx.memory.of(wish.key, "token", Recent)
    token = recent.get(now, SECRET_SECONDS, lambda: _find(ctx, wish))
    if token is None:
        recent.expire()
    return token


def _find(ctx: Context, wish: Desired) -> str | None:
    token = _read(ctx, wish)
    own = wish.spec.security.control_token_secret_ref is None
    if token is not None or not own or wish.spec.paused:
        return token
    made = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        ctx.cluster.create(children.control_secret(wish.owner, made))
    except AlreadyExists:  # made by a pass whose answer got lost
        return _read(ctx, wish)
    return made


def _read(ctx: Context, wish: Desired) -> str | None:
    name, key = wish.token_secret
    found = ctx.cluster.get("Secret", wish.owner.namespace, name)
    encoded = ((found or {}).get("data") or {}).get(key)
    if not encoded:
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode("ascii").strip()
    except (binascii.Error, UnicodeDecodeError):
        return None
