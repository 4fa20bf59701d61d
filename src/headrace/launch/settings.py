"""Everything that can be configured, once: the flags, the configuration file and the documents are made from these structs.

Owns: names, defaults, ranges and help of every setting. Runs in: supervisor and CLI. Must not know: click, processes.
A section of headrace.toml is a struct here, a key is a field, a flag is the field's name with dashes. The tables of service
classes and tenants (traffic_settings.py) have no flags.
"""

import pathlib
import re
import tomllib
import typing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.launch.traffic_settings import ClassTable, TenantTable, traffic_policy
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.traffic import TrafficPolicy

Port = Annotated[int, Meta(ge=0, le=65535, description="Port to listen on. 0 takes a free one.")]
Count = Annotated[int, Meta(ge=1)]
PositiveNumber = Annotated[float, Meta(gt=0)]
MAX_SECONDS = 604_800.0  # a week: "for ever" with room to count
MAX_MS = 1000 * MAX_SECONDS


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[model]: which model, and how it is prepared."""

    model: Annotated[
        str | None,
        Meta(
            description="What to serve: a folder with an OpenVINO IR, safetensors or a prepared model, a .gguf file, a Hugging "
            "Face Hub id, or sim:KEY=VALUE,... for the simulated model. Default: the embedded SmolLM2-135M-Instruct."
        ),
    ] = None
    served_model_name: Annotated[str | None, Meta(description="The id that clients use. Default: the model's own name.")] = None
    precision: Annotated[
        Literal["int8", "int8-group", "f16", "f32"],
        Meta(
            description="Precision of the weights when they are prepared (a ready OpenVINO IR keeps its own). int8 has one "
            "scale for each output channel, int8-group several: closer to the original, about 10 % slower."
        ),
    ] = "int8"
    quantize_activations: Annotated[
        bool,
        Meta(
            description="Multiply int8 weights with activations rounded to int8. Off: about 1.5 times slower, and with "
            "--kv-cache-precision f32 the greedy answer does not depend on what else is in the batch."
        ),
    ] = True
    compute_precision: Annotated[
        Literal["f32", "bf16"],
        Meta(
            description="Precision of the arithmetic. bf16: on CPUs with AMX a faster prefill and a slower decode of few "
            "sequences."
        ),
    ] = "f32"
    cache_dir: Annotated[
        str | None,
        Meta(
            description="Where prepared models are kept. Default: $HEADRACE_CACHE_DIR, or headrace in the user's cache folder."
        ),
    ] = None


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[scheduler]: what one step may hold."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="Most sequences that run at once.")] = 64
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1_048_576,
            description="Most tokens computed in one step (the token budget): smaller gives steadier gaps between tokens, "
            "larger a faster prefill. At least --max-num-seqs.",
        ),
    ] = 256
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="Most tokens of one sequence, prompt and output. Default: what the model was made for."),
    ] = None
    policy: Annotated[
        Literal["headrace", "fcfs"],
        Meta(
            description="headrace: by class, fair between tenants, earliest first-token target first. fcfs: first come, first "
            "served, whatever class and tenant."
        ),
    ] = "headrace"
    step_time_budget: Annotated[
        bool,
        Meta(
            description="Cut prompts into chunks so that steps keep the TBT targets of the streams that run. Off: only "
            "--max-num-batched-tokens bounds a step."
        ),
    ] = True
    min_chunk_tokens: Annotated[
        int, Meta(ge=1, le=8192, description="Fewest tokens of a prompt that a step computes, whatever the TBT target.")
    ] = 64
    class_aging_seconds: Annotated[
        float,
        Meta(
            ge=0.1,
            le=MAX_SECONDS,
            description="For each class above it, a request waits so long (or an equal part of its ttft_target_ms, if that is "
            "longer) and is then served as one of that class: nobody starves.",
        ),
    ] = 30.0


class CacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[cache]: the KV pool and the prefix cache."""

    kv_cache_gib: Annotated[
        PositiveNumber | None, Meta(description="Size of the KV pool in GiB. Default: by fraction of free memory.")
    ] = None
    kv_cache_memory_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=0.9,
            description="Part of the memory that is free at start for the KV pool, at most what all sequences can use.",
        ),
    ] = 0.3
    kv_cache_precision: Annotated[
        Literal["auto", "u8", "f16", "f32"], Meta(description="Precision of the KV cache. auto: what suits the device.")
    ] = "auto"
    prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of equal prompt beginnings.")] = True


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[server]: the address and what is accepted."""

    host: Annotated[
        str, Meta(description="Address to listen on. 0.0.0.0 is reachable from other machines: there are no keys yet.")
    ] = "127.0.0.1"
    port: Port = 8000
    max_queued_requests: Annotated[
        int,
        Meta(ge=0, description="Most requests that wait beside the running ones; more are refused with 503 and Retry-After."),
    ] = 1024
    admission: Annotated[
        Literal["forecast", "bounds"],
        Meta(
            description="forecast: a request whose first token would come later than its class allows is refused at once and "
            "told when to come again. bounds: only full queues refuse."
        ),
    ] = "forecast"
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest request body.")] = 4 * 1024 * 1024
    max_choices: Annotated[
        int, Meta(ge=1, le=512, description="Largest n of one call. n times the prompts of a list is at most 512 besides.")
    ] = 128
    keep_alive_seconds: Annotated[float, Meta(ge=1, le=MAX_SECONDS, description="How long an idle connection is kept.")] = 75.0
    sse_ping_seconds: Annotated[
        float, Meta(ge=0.5, le=MAX_SECONDS, description="A comment is sent on a stream that was silent for so long.")
    ] = 15.0
    default_class: Annotated[
        str,
        Meta(
            description="Service class of requests that name none: interactive, standard, batch, or one of the configuration "
            "file's [classes.NAME]."
        ),
    ] = "standard"


class OperationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[operation]: processes, their threads and their end."""

    threads: Annotated[Count | None, Meta(description="Threads of the model. Default: all cores that the process may use.")] = (
        None
    )
    drain_seconds: Annotated[
        float, Meta(ge=0, le=MAX_SECONDS, description="After SIGTERM, how long running streams may go on.")
    ] = 30.0
    progress_timeout_seconds: Annotated[
        float, Meta(ge=2, le=MAX_SECONDS, description="Not ready when the worker has shown no sign of life for so long.")
    ] = 30.0
    hang_timeout_seconds: Annotated[
        float,
        Meta(
            ge=2,
            le=MAX_SECONDS,
            description="A worker that has shown no sign of life for so long is killed and replaced. Steps must be shorter.",
        ),
    ] = 300.0
    log_format: Annotated[Literal["auto", "human", "json"], Meta(description="auto: human on a terminal, else JSON lines.")] = (
        "auto"
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level that is logged.")] = "info"
    log_prompts: Annotated[
        bool, Meta(description="Writes prompts into the log, one for each request. Off: no text of clients stands in it.")
    ] = False
    stall_threshold_ms: Annotated[
        float,
        Meta(gt=0, le=MAX_MS, description="A request that does not get on for so long has stalled: counted, with its cause."),
    ] = 250.0
    debug_requests: Annotated[
        int, Meta(ge=1, le=100_000, description="How many finished requests GET /debug/requests remembers.")
    ] = 256
    admin_token: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1024, pattern="^[!-~]+$")] | None,
        Meta(
            description="Opens /debug to who sends it as a bearer token. Default: /debug is open to this machine only. A flag "
            "is seen by all users of the machine: rather use the environment."
        ),
    ] = None
    record: Annotated[
        str | None,
        Meta(
            description="Writes a record of the traffic into this new file: times, lengths and salted hashes, no text. See "
            "docs/record.md."
        ),
    ] = None
    record_max_mib: Annotated[
        int, Meta(ge=1, le=1_048_576, description="A record ends when its file has grown so long. The server goes on.")
    ] = 1024
    otlp_endpoint: Annotated[
        str | None,
        Meta(description="Sends a trace of each request to this OpenTelemetry collector, http://HOST:4318 (extra `otel`)."),
    ] = None
    trace_sample_ratio: Annotated[
        float, Meta(ge=0, le=1, description="Part of the requests that are traced, of those whose client does not decide it.")
    ] = 1.0

    def __repr__(self) -> str:
        """Without the token, wherever it may be shown."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "admin_token"}
        return f"OperationSettings({shown})"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration. headrace.toml has a table for each field."""

    model: ModelSettings = ModelSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    cache: CacheSettings = CacheSettings()
    server: ServerSettings = ServerSettings()
    operation: OperationSettings = OperationSettings()
    classes: dict[str, ClassTable] = {}
    tenants: dict[str, TenantTable] = {}

    def traffic(self) -> TrafficPolicy:
        """Service classes and tenants. Raises ConfigurationError naming the table or key."""
        return traffic_policy(self.server.default_class, self.classes, self.tenants)

    def without_secrets(self) -> "Settings":
        """The same for processes that need no secret."""
        return msgspec.structs.replace(self, operation=msgspec.structs.replace(self.operation, admin_token=None))

    def check(self) -> "Settings":
        """Raise ConfigurationError when settings contradict one another; else return self."""
        self.traffic()
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            raise ConfigurationError(
                f"--max-num-batched-tokens ({self.scheduler.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.scheduler.max_num_seqs}): every running sequence needs one token in each step."
            )
        return self


SECTIONS_WITH_FLAGS = ("model", "scheduler", "cache", "server", "operation")


class SettingField(msgspec.Struct, frozen=True):
    """One setting as the CLI needs it."""

    section: str
    name: str
    kind: type  # str, int, float or bool
    choices: tuple[str, ...]  # of a Literal; empty otherwise
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """--max-num-seqs for max_num_seqs."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """HEADRACE_MAX_NUM_SEQS for max_num_seqs."""
        return "HEADRACE_" + self.name.upper()


def setting_fields(sections: tuple[str, ...] = SECTIONS_WITH_FLAGS) -> list[SettingField]:
    """All settings of the sections that are flags too, in order."""
    hints = typing.get_type_hints(Settings)
    found = []
    for section in sections:
        struct = hints[section]
        annotations = typing.get_type_hints(struct, include_extras=True)
        defaults = struct()
        for name in struct.__struct_fields__:
            kind, meta = typing.get_args(annotations[name])
            options = [option for option in typing.get_args(kind) if option is not type(None)]
            choices: tuple[str, ...] = ()
            if typing.get_origin(kind) is Literal:
                kind, choices = str, tuple(options)
            elif options:
                kind = typing.get_args(options[0])[0] if typing.get_args(options[0]) else options[0]
            found.append(SettingField(section, name, kind, choices, getattr(defaults, name), meta.description))
    return found


def load_settings(config_file: str | None, flags: dict[str, Any]) -> Settings:
    """Defaults, then the file, then the flags that were given ({field name: value}; None: not given).

    Raises ConfigurationError naming the key, also for keys that do not exist.
    """
    tree: dict[str, Any] = {}
    if config_file is not None:
        tree = _read_toml(pathlib.Path(config_file))
    sections = {field.name: field.section for field in setting_fields()}
    for name, value in flags.items():
        if value is not None:
            tree.setdefault(sections[name], {})[name] = value
    return _convert(tree, "configuration").check()


def _read_toml(path: pathlib.Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
    _convert(tree, str(path))
    return tree


def _convert(tree: dict[str, Any], source: str) -> Settings:
    """Raises ConfigurationError that begins with the source and names the key with its whole path."""
    for section, kind in (("classes", ClassTable), ("tenants", TenantTable)):  # msgspec does not name the keys of a dict
        tables = tree.get(section)
        for name, table in tables.items() if isinstance(tables, dict) else ():
            _convert_part(table, kind, f"{source}: ", f"{section}.{name}")
    settings: Settings = _convert_part(tree, Settings, f"{source}: ", "")
    return settings


def _convert_part(tree: Any, kind: Any, source: str, path: str) -> Any:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(source + _explain(str(error), path)) from None


def _explain(message: str, path: str) -> str:
    """msgspec's message, with the place as `section.key`. `path`: of what was converted, "" for the whole."""
    reason, _, place = message.partition(" - at `$")
    place = ".".join(part for part in (path, place.rstrip("`").removeprefix(".")) if part)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", reason, re.DOTALL)
    if unknown:
        return f"unknown key `{place}.{unknown[1]}`" if place else f"unknown key `{unknown[1]}`"
    return f"{reason} - at `{place}`" if place else reason
