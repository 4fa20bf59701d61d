"""The tables of service classes and tenants in headrace.toml, and the traffic policy that they make.

Owns: [classes.NAME], [tenants.NAME]. Runs in: supervisor and CLI. Must not know: flags (these tables have none), processes.
"""

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.traffic import ServiceClass, Tenant, TrafficPolicy

MAX_NAME_CHARS = 64
MAX_MS = 604_800_000.0  # a week
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a name is a label in metrics and the value of a header
_NEEDED = ("level", "ttft_target_ms", "tbt_target_ms")

Milliseconds = Annotated[float, Meta(ge=0, le=MAX_MS)]
Weight = Annotated[float, Meta(gt=0, le=1000)]


class ClassTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """[classes.NAME]: changes these keys of a default class, or describes a class of its own. None: not said."""

    level: Annotated[int, Meta(ge=0, le=1000)] | None = None
    weight: Weight | None = None
    ttft_target_ms: Annotated[float, Meta(gt=0, le=MAX_MS)] | None = None
    tbt_target_ms: Milliseconds | None = None
    queue_timeout_ms: Milliseconds | None = None
    max_queued_requests: Annotated[int, Meta(ge=0, le=1_000_000_000)] | None = None
    max_queued_tokens: Annotated[int, Meta(ge=0, le=1_000_000_000_000)] | None = None


class TenantTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[tenants.NAME]: somebody with a share of its own."""

    weight: Weight = 1.0


def traffic_policy(default_class: str, classes: Mapping[str, ClassTable], tenants: Mapping[str, TenantTable]) -> TrafficPolicy:
    """The default classes and tenants, changed and added to by the tables. Raises ConfigurationError naming the table."""
    for section, names in (("classes", classes), ("tenants", tenants)):
        for name in names:
            if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"`{section}.{name[:MAX_NAME_CHARS]}`: a name has 1 to {MAX_NAME_CHARS} letters, digits, dots, dashes and "
                    "underscores, and begins with a letter or digit."
                )
    by_name = {entry.name: entry for entry in TrafficPolicy().classes}
    for name, table in classes.items():
        given = {key: value for key in table.__struct_fields__ if (value := getattr(table, key)) is not None}
        by_name[name] = _class_of(name, by_name.get(name), given)
    all_tenants = {tenant.name: tenant for tenant in TrafficPolicy().tenants}
    all_tenants |= {name: Tenant(name=name, weight=table.weight) for name, table in tenants.items()}
    return TrafficPolicy(
        classes=tuple(sorted(by_name.values(), key=lambda entry: entry.level)),
        default_class=default_class,
        tenants=tuple(all_tenants.values()),
    )


def _class_of(name: str, known: ServiceClass | None, given: dict[str, float]) -> ServiceClass:
    if known is not None:
        return msgspec.structs.replace(known, **given)
    missing = [key for key in _NEEDED if key not in given]
    if missing:
        raise ConfigurationError(f"`classes.{name}` is a new class: it must give {', '.join(missing)}.")
    return msgspec.convert({"name": name} | given, ServiceClass)
