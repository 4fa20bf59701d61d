"""Everything that a simulation depends on, as it is saved: the same settings give the same result, byte for byte.

Owns: SimulationSettings. Runs in: simulator. Must not know: how traffic is made, figures.
"""

from typing import Literal

import msgspec

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.traffic import TrafficPolicy
from headrace.scheduling import SchedulerConfig
from headrace.simulation.limits import RANGES, check_range, check_shares
from headrace.simulation.policies import Machine
from headrace.simulation.requests import VOCAB_SIZE
from headrace.simulation.step_model import StepModel

ARRIVALS = ("poisson", "bursty", "constant", "trace")
DEFAULT_REQUESTS = 2000


def _check_ranges(settings: msgspec.Struct) -> None:
    """Of each field that has a range and a value. Raises ConfigurationError."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if name in RANGES and value is not None:
            check_range(name, value, RANGES[name])


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated server. Names and defaults of `headrace serve`; the pool's size is in blocks."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_model_len: int = 8192
    num_blocks: int = 4096
    block_size: int = 32
    prefix_caching: bool = True
    max_queued_requests: int = 1024
    max_queued_prompt_tokens: int = 1_000_000
    admission: Literal["forecast", "bounds"] = "forecast"
    policy: Literal["headrace", "fcfs"] = "headrace"
    step_time_budget: bool = True
    min_chunk_tokens: int = 64
    class_aging_seconds: float = 30.0

    def machine(self, step_model: StepModel, traffic: TrafficPolicy) -> Machine:
        """What the engine runs. Raises ConfigurationError for numbers that cannot work together."""
        _check_ranges(self)
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.prefix_caching,
            traffic=traffic,
            policy=self.policy,
            class_aging_ns=round(self.class_aging_seconds * 1e9),
            step_time_budget=self.step_time_budget,
            min_chunk_tokens=self.min_chunk_tokens,
        )
        spec = ExecutorSpec(
            model_id="simulated",
            kv_format="simulated",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
        )
        return Machine(
            config=config,
            spec=spec,
            step_model=step_model,
            traffic=traffic,
            max_in_flight=self.max_num_seqs + self.max_queued_requests,
            max_queued_prompt_tokens=self.max_queued_prompt_tokens,
            forecasts_admission=self.admission == "forecast",
        )

    @property
    def context_tokens(self) -> int:
        """Most tokens of one sequence that can ever run: context and pool both considered."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class TrafficSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What comes. Rates in requests per second."""

    workload: str = "azure-conversation"
    num_requests: int | None = None
    duration_seconds: float | None = None
    arrival: str = "poisson"  # "trace" for a trace, and only then
    rate: float | None = None  # None: by `load`; a trace: as recorded
    load: float | None = None  # times the measured capacity
    rate_scale: float = 1.0  # a trace's times are divided by it
    length_scale: float = 1.0
    shared_prefix_tokens: int = 0  # that all prompts of a tenant begin with
    max_tokens: int | None = None  # what requests ask for; None: the next power of two of what they will produce
    timeout_seconds: float | None = None  # of each request
    burst_on_seconds: float = 1.0
    burst_off_seconds: float = 4.0
    classes: dict[str, float] = {}  # name -> share of the requests; empty: all in the default class, or by a mix's names
    tenants: dict[str, float] = {}  # name -> share of the requests; empty: the default one
    seed: int = 0

    def check(self, policy: TrafficPolicy) -> None:
        """Raise ConfigurationError, in words for the user."""
        if self.arrival not in ARRIVALS:
            raise ConfigurationError(f"arrival is {self.arrival!r}; it must be one of {', '.join(ARRIVALS)}.")
        if self.workload.startswith("trace:") != (self.arrival == "trace"):
            raise ConfigurationError("a trace comes at its own times (arrival trace), and nothing else does.")
        if sum((self.rate is not None, self.load is not None, self.rate_scale != 1.0)) > 1:
            raise ConfigurationError("give one of rate, load and rate_scale.")
        if self.rate_scale != 1.0 and self.arrival != "trace":
            raise ConfigurationError("rate_scale is for a trace: give a rate.")
        _check_ranges(self)
        check_shares("classes", self.classes)
        check_shares("tenants", self.tenants)
        if unknown := set(self.classes) - set(policy.class_names):
            raise ConfigurationError(f"no class {', '.join(sorted(unknown))}; there are {', '.join(policy.class_names)}.")


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    server: ServerSettings = ServerSettings()
    traffic: TrafficSettings = TrafficSettings()
    step_model: StepModel = StepModel()
    policy: TrafficPolicy = TrafficPolicy()
    policies: tuple[str, ...] = ("headrace", "fcfs", "no-chunking", "reserve-max")
    max_tries: int = 1  # of a refused request; 1: it does not come again
    ttft_ms: float | None = None  # targets of all classes in place of their own
    tbt_ms: float | None = None
    warm_up_seconds: float = 0.0  # requests due before are not measured
    window_seconds: float = 10.0  # over which fairness is judged

    def check(self) -> None:
        """Raise ConfigurationError, in words for the user. The server's own numbers are checked by its `machine`."""
        self.traffic.check(self.policy)
        _check_ranges(self)
