"""Identities for tests of measuring."""

from headrace.telemetry.snapshot import RequestIdentity


def identity(num_prompt_tokens=7, *, request_id=1, service_class="standard", tenant="default", max_tokens=100):
    """One request's identity."""
    return RequestIdentity(
        request_id=request_id,
        client_request_id=f"client-{request_id}",
        choice_index=0,
        api="/v1/completions",
        model="m",
        service_class=service_class,
        tenant=tenant,
        priority=0,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
    )
