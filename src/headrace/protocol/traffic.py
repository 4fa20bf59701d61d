"""Service classes and tenants: what the configuration says about who is to be served how.

Owns: ServiceClass, Tenant, TrafficPolicy. Runs in: every process. Must not know: how a policy is carried out.
"""

import msgspec

from headrace.protocol.errors import ConfigurationError

MAX_CLASSES = 8  # each has places on the status page and series of its own
MAX_TENANTS = 256
DEFAULT_TENANT = "default"  # of a request that names none
OTHER_TENANT = "other"  # all names that the configuration does not know: they share one bucket
_NS_PER_MS = 1_000_000


class ServiceClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a class of requests is promised. Times in milliseconds, as in the configuration; 0: none where said so."""

    name: str
    level: int  # lower is served first, and may take the place of a strictly higher level
    weight: float = 1.0  # share of tokens among classes of one level and tenants that compete
    ttft_target_ms: float  # first tokens are due so long after arrival
    tbt_target_ms: float  # steps are kept so short that tokens come this close together; 0: no target
    queue_timeout_ms: float = 0.0  # who has waited so long leaves without having run; 0: no limit
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000  # prompt tokens

    @property
    def ttft_target_ns(self) -> int:
        """In nanoseconds."""
        return round(self.ttft_target_ms * _NS_PER_MS)

    @property
    def tbt_target_ns(self) -> int:
        """In nanoseconds; 0: no target."""
        return round(self.tbt_target_ms * _NS_PER_MS)

    @property
    def queue_timeout_ns(self) -> int:
        """In nanoseconds; 0: no limit."""
        return round(self.queue_timeout_ms * _NS_PER_MS)


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Somebody who gets a share. `weight`: twice as much is twice the tokens when both are backlogged."""

    name: str
    weight: float = 1.0


INTERACTIVE = ServiceClass(
    name="interactive", level=0, weight=4.0, ttft_target_ms=2_000, tbt_target_ms=150, queue_timeout_ms=30_000
)
STANDARD = ServiceClass(
    name="standard", level=1, weight=2.0, ttft_target_ms=10_000, tbt_target_ms=250, queue_timeout_ms=120_000
)
BATCH = ServiceClass(name="batch", level=2, weight=1.0, ttft_target_ms=600_000, tbt_target_ms=0, queue_timeout_ms=0)


class TrafficPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The classes in order of level, and the tenants; the same in every process. Raises ConfigurationError."""

    classes: tuple[ServiceClass, ...] = (INTERACTIVE, STANDARD, BATCH)
    default_class: str = "standard"
    tenants: tuple[Tenant, ...] = (Tenant(name=DEFAULT_TENANT), Tenant(name=OTHER_TENANT))

    def __post_init__(self) -> None:
        names = self.class_names
        if not 1 <= len(names) <= MAX_CLASSES or len(set(names)) != len(names):
            raise ConfigurationError(
                f"There must be 1 to {MAX_CLASSES} service classes with different names, not {list(names)}."
            )
        if self.default_class not in names:
            raise ConfigurationError(f"The default class {self.default_class!r} is none of {', '.join(names)}.")
        tenants = self.tenant_names
        if len(tenants) > MAX_TENANTS or len(set(tenants)) != len(tenants):
            raise ConfigurationError(f"There must be at most {MAX_TENANTS} tenants with different names.")
        if not {DEFAULT_TENANT, OTHER_TENANT} <= set(tenants):
            raise ConfigurationError(f"The tenants must include {DEFAULT_TENANT!r} and {OTHER_TENANT!r}.")
        weights = [(entry.name, entry.weight) for entry in self.classes] + [
            (entry.name, entry.weight) for entry in self.tenants
        ]
        for name, weight in weights:
            if not 0 < weight <= 1000:
                raise ConfigurationError(f"The weight of {name!r} must be above 0 and at most 1000, not {weight}.")
        for entry in self.classes:
            for field in ("level", "tbt_target_ms", "queue_timeout_ms", "max_queued_requests", "max_queued_tokens"):
                if getattr(entry, field) < 0:
                    raise ConfigurationError(f"{field} of class {entry.name!r} must not be negative.")
            if entry.ttft_target_ms <= 0:
                raise ConfigurationError(f"ttft_target_ms of class {entry.name!r} must be above 0.")

    @property
    def class_names(self) -> tuple[str, ...]:
        """In order."""
        return tuple(entry.name for entry in self.classes)

    @property
    def tenant_names(self) -> tuple[str, ...]:
        """In order."""
        return tuple(entry.name for entry in self.tenants)

    def class_of(self, name: str) -> ServiceClass:
        """The class of that name; the default class for one that is unknown (past the gateway none is)."""
        found = {entry.name: entry for entry in self.classes}
        return found.get(name) or found[self.default_class]

    def tenant_name(self, offered: str) -> str:
        """The tenant that a request counts for: a known name, the default for none, else the shared bucket."""
        if not offered:
            return DEFAULT_TENANT
        return offered if offered in self.tenant_names else OTHER_TENANT
