"""Service class, tenant, priority and origin of a request: what reaches the service, and what the answer says."""

import time

import pytest

from headrace.protocol.traffic import DEFAULT_TENANT, OTHER_TENANT, ServiceClass, Tenant, TrafficPolicy
from tests.http.fakes import Surface, error_of, events_of

OWN_CLASSES = TrafficPolicy(
    classes=(
        ServiceClass(name="gold", level=0, ttft_target_ms=500, tbt_target_ms=50),
        ServiceClass(name="silver", level=1, ttft_target_ms=900, tbt_target_ms=90),
        ServiceClass(name="lead", level=5, ttft_target_ms=9000, tbt_target_ms=0),
    ),
    default_class="silver",
    tenants=(Tenant(name=DEFAULT_TENANT), Tenant(name=OTHER_TENANT), Tenant(name="acme", weight=2.0)),
)


@pytest.mark.parametrize(
    ("tier", "service_class", "answered"),
    [
        (None, "standard", None),
        ("auto", "standard", "default"),
        ("default", "standard", "default"),
        ("priority", "interactive", "priority"),
        ("flex", "batch", "flex"),
        ("scale", "batch", "scale"),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_service_tier_chooses_the_class_and_is_echoed(surface, endpoint, tier, service_class, answered):
    ask = getattr(surface, endpoint)
    whole = ask(service_tier=tier).json()
    assert whole.get("service_tier") == answered
    assert ("service_tier" in whole) == (answered is not None)
    chunks = events_of(ask(service_tier=tier, stream=True, stream_options={"include_usage": True}).content)
    assert [chunk.get("service_tier") for chunk in chunks] == [answered] * len(chunks)
    assert [spec.service_class for spec in surface.service.specs] == [service_class] * 2


@pytest.mark.parametrize(
    ("tier", "service_class"), [("priority", "gold"), ("flex", "lead"), ("scale", "lead"), ("auto", "silver")]
)
def test_without_the_usual_names_the_levels_decide(tier, service_class):
    surface = Surface(traffic=OWN_CLASSES)
    assert surface.chat(service_tier=tier).status_code == 200
    assert surface.service.specs[0].service_class == service_class


@pytest.mark.parametrize("tier", ["Priority", "", "fast", 3, True, ["auto"]])
def test_an_unknown_tier_is_refused(surface, tier):
    error = error_of(response := surface.chat(service_tier=tier))
    assert (response.status_code, error["param"]) == (400, "service_tier")
    assert not surface.service.specs


def test_the_header_wins_over_the_tier_and_the_answer_says_what_was_used(surface):
    for name, tier in (("interactive", "priority"), ("standard", "default"), ("batch", "flex")):
        answer = surface.chat(headers={"x-headrace-class": name}, service_tier="priority").json()
        assert (surface.service.specs[-1].service_class, answer["service_tier"]) == (name, tier)
    assert surface.complete(headers={"x-headrace-class": "batch"}).json()["service_tier"] == "flex"


@pytest.mark.parametrize("name", ["", "gold", "Batch", "x" * 2000, "b\u00e4tch"])
def test_an_unknown_class_is_refused_with_the_known_ones(surface, name):
    response = surface.request(
        "POST", "/v1/completions", json={"prompt": "Hi"}, headers=[(b"x-headrace-class", name.encode("latin-1"))]
    )
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "x-headrace-class")
    assert "interactive, standard, batch" in error["message"]
    assert not surface.service.specs


@pytest.mark.parametrize(
    ("header", "tenant"), [(None, "default"), ("", "default"), ("acme", "acme"), ("nobody", "other"), ("ACME", "other")]
)
def test_tenants_are_those_of_the_configuration(header, tenant):
    surface = Surface(traffic=OWN_CLASSES)
    surface.chat(headers={} if header is None else {"x-headrace-tenant": header})
    assert surface.service.specs[0].tenant_id == tenant


@pytest.mark.parametrize(("priority", "is_taken"), [(-(2**31), True), (2**31 - 1, True), (-(2**31) - 1, False), (2**31, False)])
def test_priority_is_a_32_bit_number(surface, priority, is_taken):
    response = surface.chat(priority=priority)
    assert response.status_code == (200 if is_taken else 400)
    if is_taken:
        assert surface.service.specs[0].priority == priority
    else:
        assert error_of(response)["param"] == "priority"


def test_the_origin_names_each_choice_and_its_moments(surface):
    before_ns = time.monotonic_ns()
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "x=y"}
    surface.complete(headers={"x-request-id": "mine-7"} | trace, prompt=["A", "B"], n=2)
    origins = [spec.origin for spec in surface.service.specs]
    assert [origin.choice_index for origin in origins] == [0, 1, 2, 3]
    for origin in origins:
        assert (origin.client_request_id, origin.api) == ("mine-7", "/v1/completions")
        assert (origin.traceparent, origin.tracestate) == (trace["traceparent"], trace["tracestate"])
        assert before_ns < origin.received_ns < origin.tokenized_ns < time.monotonic_ns()


def test_trace_context_that_is_far_too_long_is_left_out(surface):
    surface.chat(headers={"traceparent": "0" * 129, "tracestate": "x" * 2049})
    assert (surface.service.specs[0].origin.traceparent, surface.service.specs[0].origin.tracestate) == ("", "")
