"""What a prepared folder says of itself (headrace.json).

Owns: the manifest's fields. Runs in: models/ writes it, launch, executors and gateway read it. Must not know: files.
"""

import msgspec

FORMAT_VERSION = 1


class GenerationDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling values for requests that leave them out, as the model's author set them. None: the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity and limits of a prepared model. `identity` is part of every prefix-cache key."""

    format_version: int
    name: str  # the default served name, such as SmolLM2-135M-Instruct
    identity: str  # hash over source bytes, precision and the preparing code's version
    source: str  # where it came from, as told to --model
    architecture: str
    precision: str  # of the weights: int8, f16, f32, or "ir" when a ready IR was taken as it is
    vocab_size: int  # true vocabulary
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    add_bos_token: bool
    versions: dict[str, str]  # headrace, openvino and the like, when it was prepared
