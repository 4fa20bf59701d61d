"""Metrics of inference servers: is the exposition valid, and which name does each server give to the same thing.

Owns: read_exposition and the table of known names. Runs in: audit, pure. Must not know: sockets, checks.
The text format is Prometheus' own; its official parser reads it.
"""

import math
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

# What an operator needs, and the names it goes by: Headrace, vLLM, SGLang, TGI, llama.cpp's server.
KNOWN_NAMES: dict[str, tuple[str, ...]] = {
    "ttft": (
        "headrace_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
        "sglang:time_to_first_token_seconds",
        "tgi_request_first_token_duration",
    ),
    "tbt": (
        "headrace_inter_token_latency_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
        "sglang:time_per_output_token_seconds",
        "tgi_request_mean_time_per_token_duration",
    ),
    "running": (
        "headrace_num_requests_running",
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "tgi_batch_current_size",
        "llamacpp:requests_processing",
    ),
    "waiting": (
        "headrace_num_requests_waiting",
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "tgi_queue_size",
        "llamacpp:requests_deferred",
    ),
    "kv": (
        "headrace_kv_cache_usage_perc",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
        "tgi_batch_current_max_tokens",
    ),
    "tokens": (
        "headrace_generation_tokens",
        "vllm:generation_tokens",
        "sglang:generation_tokens",
        "tgi_request_generated_tokens",
        "llamacpp:tokens_predicted",
    ),
    "finished": (
        "headrace_request_success",
        "vllm:request_success",
        "sglang:num_requests",
        "tgi_request_success",
    ),
}


@dataclass(slots=True)
class Exposition:
    """Families by name; values of a name summed over its labels. `faults`: why the text is not valid, as sentences."""

    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def find(self, thing: str) -> str | None:
        """The family's name here, for a key of KNOWN_NAMES."""
        return next((name for name in KNOWN_NAMES[thing] if name in self.kinds or f"{name}_total" in self.kinds), None)

    def gauge(self, thing: str) -> float | None:
        """The present value of a gauge, over all its labels."""
        name = self.find(thing)
        return None if name is None else self.values.get(name)

    def count(self, thing: str) -> float | None:
        """How many samples a histogram holds."""
        name = self.find(thing)
        return None if name is None else self.values.get(f"{name}_count")


def read_exposition(text: str) -> Exposition:
    """Never raises: what is wrong stands in `faults`."""
    found = Exposition()
    typed = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ") and len(line.split()) >= 4]
    twice = sorted({name for name in typed if typed.count(name) > 1})
    if twice:
        found.faults.append(f"TYPE stands more than once for {', '.join(twice[:3])}")
    not_numbers = []
    try:
        for family in text_string_to_metric_families(text):
            found.kinds[family.name] = family.type
            for sample in family.samples:
                found.values[sample.name] = found.values.get(sample.name, 0.0) + sample.value
                if math.isnan(sample.value) and family.type != "summary":
                    not_numbers.append(sample.name)
    except (ValueError, KeyError, IndexError) as error:
        found.faults.append(f"does not parse: {error}")
    if not_numbers:
        found.faults.append(f"NaN in {', '.join(sorted(set(not_numbers))[:3])}")
    return found
