"""Environment variables named HEADRACE_*: which there are, and which are mistaken.

Owns: check_environment. Runs in: CLI. Must not know: what a setting does.
"""

import difflib
import re
from collections.abc import Mapping

from headrace.launch.settings import setting_fields
from headrace.protocol.errors import ConfigurationError

PREFIX = "HEADRACE_"
KNOWN_VARIABLES = frozenset(
    {*(field.variable for field in setting_fields()), "HEADRACE_CONFIG", "HEADRACE_AUDIT_KEY", "HEADRACE_BENCH_KEY"}
)
# Kubernetes sets these in every pod for each service of its namespace; a service may well be called headrace.
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_SERVICE_LINK = re.compile(
    rf"{PREFIX}(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://\S+")


def is_service_address(name: str, value: str) -> bool:
    """Whether this is Kubernetes' HEADRACE_PORT=tcp://10.0.0.7:8000 (or of a service HEADRACE_...), which is not a port."""
    return name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value) is not None


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError naming each HEADRACE_* variable that nothing reads. Empty ones count as unset."""
    unknown = [
        name
        for name, value in sorted(environment.items())
        if name.startswith(PREFIX)
        and value
        and name not in KNOWN_VARIABLES
        and not _SERVICE_LINK.fullmatch(name)
        and not is_service_address(name, value)
    ]
    if unknown:
        noun = "variable" if len(unknown) == 1 else "variables"
        raise ConfigurationError(f"environment: unknown {noun} {', '.join(map(_with_hint, unknown))}")


def _with_hint(name: str) -> str:
    near = difflib.get_close_matches(name, sorted(KNOWN_VARIABLES), n=1, cutoff=0.8)
    return f"{name} (did you mean {near[0]}?)" if near else name
