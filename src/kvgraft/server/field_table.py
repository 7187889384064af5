"""Checks of the fields of a body: each is read, refused or left out unless it asks for nothing, or changes nothing.

A field that is in no table is refused, too: what a client asks for is done, named as left out, or refused. The tables are
in `body_fields`; `docs/reference/http.md` holds what `field_tables` writes of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvgraft.http.errors import BadRequestError
from kvgraft.http.fields import MAX_NAME_CHARS, closest_name
from kvgraft.server.body_fields import BODY_FIELDS, SHOWN, BodyField, Endpoint, Handling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.http.fields import Fields


def table_of(endpoint: Endpoint) -> Mapping[str, BodyField]:
    """Return the fields of an endpoint by name."""
    return _TABLES[endpoint]


def check_fields(fields: Fields, endpoint: Endpoint) -> tuple[str, ...]:
    """Refuse what an endpoint does not know, and what it knows and does not do; return the fields that are left out.

    Args:
        fields: The whole body; null is absent.
        endpoint: Endpoint of the body.

    Raises:
        BadRequestError: It names the field, and what was meant or what to do instead.
    """
    table = table_of(endpoint)
    left_out: list[str] = []
    for name in fields.values:
        if not fields.has(name):
            continue
        field = table.get(name)
        if field is None:
            raise _unknown(name, endpoint)
        if field.handling in (Handling.REFUSED, Handling.LEFT_OUT) and not field.asks_for_nothing(fields.values[name]):
            if field.handling is Handling.REFUSED:
                raise fields.error(name, f"is not supported by this server; {field.text}")
            left_out.append(name)
    return tuple(left_out)


def field_tables() -> str:
    """Return the Markdown tables of the fields of all endpoints that are served, one per way of handling them."""
    shown = [field for field in BODY_FIELDS if field.endpoints & SHOWN]
    tables = []
    for handling, head in _HEADS.items():
        rows = _rows([field for field in shown if field.handling is handling])
        tables.append("\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows]))
    return "\n\n".join(tables) + "\n"


def _unknown(name: str, endpoint: Endpoint) -> BadRequestError:
    short = name[:MAX_NAME_CHARS]
    elsewhere = [str(other) for other in Endpoint if other in SHOWN and name in table_of(other)]
    if elsewhere:
        hint = f"it is one of {', '.join(elsewhere)}"
    else:
        known = [field.name for field in table_of(endpoint).values() if field.handling is Handling.READ]
        closest = closest_name(name, known)
        hint = f"did you mean {closest!r}?" if closest else "docs/reference/http.md lists the fields; leave it out"
    return BadRequestError(f"{short!r} is no field of {endpoint}; {hint}", param=short, code="unknown_field")


def _rows(fields: Sequence[BodyField]) -> list[str]:
    """Write a row per field; fields of the same endpoints for which the same holds share one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for field in fields:
        nothing = ", ".join(f"`{json.dumps(value)}`" for value in field.nothing)
        name = f"`{field.name}`" + (f" ({nothing})" if nothing else "")
        served = ", ".join(str(endpoint) for endpoint in Endpoint if endpoint in field.endpoints & SHOWN)
        default = (field.default,) if field.handling is Handling.READ else ()
        rows.setdefault((served, *default, field.text), []).append(name)
    return [f"| {', '.join(names)} | {' | '.join(rest)} |" for rest, names in rows.items()]


_HEADS = {
    Handling.READ: "| field | of | default | |",
    Handling.REFUSED: "| refused (unless it is) | of | instead |",
    Handling.LEFT_OUT: "| left out, and named in reports (unless it is) | of | instead |",
    Handling.IGNORED: "| ignored | of | because |",
}
_TABLES: Mapping[Endpoint, Mapping[str, BodyField]] = {
    endpoint: {field.name: field for field in BODY_FIELDS if endpoint in field.endpoints} for endpoint in Endpoint
}
