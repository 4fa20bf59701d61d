"""The gateway process: `python -m headrace.launch.gateway_child`, its configuration as JSON on standard input.

Owns: this process' entry point. Runs in: gateway. Must not know: HTTP, rings.
"""

import sys

import msgspec

from headrace.gateway.config import GatewayConfig
from headrace.gateway.process import run_gateway


def main() -> int:
    """The gateway's exit status."""
    return run_gateway(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig))


if __name__ == "__main__":
    sys.exit(main())
