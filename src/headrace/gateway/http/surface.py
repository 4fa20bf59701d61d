"""What all endpoints share: the service, the tokenizer, the limits.

Owns: nothing but references. Runs in: gateway. Must not know: any endpoint.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace import __version__
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.guard import AdminGuard
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.http.text_workers import TextWorkers
from headrace.gateway.ports import ChatEncoder, GenerationService
from headrace.protocol.errors import RequestError
from headrace.protocol.ports import Tokenizer
from headrace.protocol.traffic import TrafficPolicy

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Surface:
    """Handed to each endpoint when the application is made.

    `stall_threshold_ns`: a client that takes nothing for so long stalls its request. `ask_log_level`: for all processes.
    `max_token_chars`: most characters of a text that one token can stand for; None: not known.
    """

    service: GenerationService
    tokenizer: Tokenizer
    chat_encoder: ChatEncoder
    settings: HttpSettings
    text_workers: TextWorkers
    traffic: TrafficPolicy
    stall_threshold_ns: int
    guard: AdminGuard
    ask_log_level: Callable[[str], None]
    max_token_chars: int | None = None

    @property
    def fingerprint(self) -> str:
        """system_fingerprint: the same as long as the served model and this program's version are."""
        name = f"{self.service.card.id}\n{self.service.card.created}\n{__version__}"
        return "fp_" + hashlib.blake2b(name.encode(), digest_size=5).hexdigest()

    def max_model_len(self) -> int:
        """Most tokens of a sequence: the worker's limit, or the model's own while no worker is ready."""
        try:
            return self.service.limits().max_model_len
        except RequestError:
            return self.service.card.max_model_len
