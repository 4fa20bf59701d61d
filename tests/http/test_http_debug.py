"""/debug: what it tells, and to whom."""

import asyncio

import pytest

from headrace.telemetry.logs import current_level
from tests.http.fakes import Surface, error_of

LOCAL = {"host": "localhost:8000"}
PATHS = [("GET", "/debug/requests"), ("GET", "/debug/log-level"), ("PUT", "/debug/log-level")]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("10.1.2.3", {}),
        ("::ffff:10.1.2.3", {}),
        ("2001:db8::1", {}),
        ("", {}),
        ("localhost", {}),
        ("127.0.0.1", {"host": "evil.example"}),
        ("127.0.0.1", {"host": "localhost.evil.example"}),
        ("127.0.0.1", {"host": "127.0.0.1.evil.example:8000"}),
        ("127.0.0.1", {"host": "10.0.0.1"}),
        ("127.0.0.1", {"host": "localhost:x@evil"}),
        ("127.0.0.1", {"host": "[::1].evil.example"}),
        ("127.0.0.1", {"host": ""}),
        ("127.0.0.1", {"host": "evil.example/x.localhost"}),
        ("127.0.0.1", {"host": "evil.example\\.localhost"}),
        ("127.0.0.1", {"host": "a b.localhost"}),
        ("127.0.0.1", {"host": ".localhost"}),
        ("127.0.0.1", {"host": "a..localhost"}),
        ("127.0.0.1", {"host": b"\xa0localhost"}),
        ("127.0.0.1", {"host": b"\xc2\xa0localhost"}),
        ("127.0.0.1", {"host": b"localhost:\xb2"}),
        ("127.0.0.1", {"host": "[::1"}),
        ("127.0.0.1", {"host": "[::1]x:80"}),
        ("127.0.0.1", {"origin": "http://evil.example"}),
        ("127.0.0.1", {"origin": "http://localhost:8000"}),
        ("127.0.0.1", {"origin": "null"}),
        ("127.0.0.1", {"sec-fetch-site": "cross-site"}),
        ("127.0.0.1", {"sec-fetch-site": "Same-Site"}),
        ("127.0.0.1", {"x-forwarded-for": "10.1.2.3"}),
        ("127.0.0.1", {"x-forwarded-host": "localhost"}),
        ("127.0.0.1", {"forwarded": "for=10.1.2.3"}),
        ("127.0.0.1", {"x-real-ip": "10.1.2.3"}),
        ("127.0.0.1", {"via": "1.1 proxy"}),
    ],
)
def test_without_a_token_only_this_machine_may(surface, method, path, address, headers):
    body = {"json": {"level": "debug"}} if method == "PUT" else {}
    response = surface.request(method, path, address=address, headers=LOCAL | headers, **body)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (403, "forbidden")
    assert "HEADRACE_ADMIN_TOKEN" in error["message"]
    assert surface.levels_asked == surface.service.debug_limits == []


@pytest.mark.parametrize(
    "name",
    [
        *("x-client-ip", "client-ip", "x-cluster-client-ip", "fly-client-ip", "true-client-ip", "x-original-host"),
        *("cf-connecting-ip", "cf-connecting-ipv6", "x-original-forwarded-for", "x-envoy-external-address"),
    ],
)
def test_what_a_proxy_says_of_its_client_is_no_loopback_client(surface, name):
    response = surface.request("GET", "/debug/requests", headers=LOCAL | {name: "127.0.0.1"})
    assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")


def status_of(app, path, headers, http_version="1.1"):
    """Of a GET from this machine whose headers and version are as given."""
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "client": ("127.0.0.1", 50123)}
    statuses = []

    async def send(message):
        statuses.append(message.get("status"))

    asyncio.run(app({**scope, "headers": headers, "http_version": http_version}, None, send))
    return statuses[0]


@pytest.mark.parametrize(("version", "status"), [("1", 403), ("1.0", 403), ("0.9", 403), ("1.1", 200), ("2", 200)])
def test_http_1_0_is_what_a_proxy_without_settings_speaks(surface, version, status):
    assert status_of(surface.app, "/debug/requests", [(b"host", b"127.0.0.1:8000")], version) == status


@pytest.mark.parametrize("path", ["/debug/requests", "/v1/models", "/nowhere"])
@pytest.mark.parametrize("hosts", [[b"evil.example", b"127.0.0.1"], [b"127.0.0.1", b"127.0.0.1"], [b"", b"localhost"]])
def test_more_than_one_host_is_refused_everywhere(surface, path, hosts):
    assert status_of(surface.app, path, [(b"host", host) for host in hosts]) == 400


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.9.9.9", "[::1]", "[::1]:8000", "box.localhost"]
)
def test_this_machine_may(surface, address, host):
    assert surface.request("GET", "/debug/requests", address=address, headers={"host": host}).status_code == 200


def test_a_call_without_a_client_address_may_not(surface):
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/debug/requests",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "http_version": "1.1",
    }
    statuses = []

    async def send(message):
        statuses.append(message.get("status"))

    asyncio.run(surface.app(scope, None, send))
    assert statuses[0] == 403


def test_a_page_of_the_server_itself_may_read(surface):
    for site in ("same-origin", "none"):
        headers = LOCAL | {"sec-fetch-site": site}
        assert surface.request("GET", "/debug/requests", headers=headers).status_code == 200


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer secret-tokens"},
        {"authorization": "Bearer secret-toke"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic secret-token"},
        {"authorization": "secret-token"},
        {"x-admin-token": "secret-token"},
    ],
)
def test_with_a_token_nobody_may_without_it_not_even_this_machine(method, path, headers):
    surface = Surface(admin_token="secret-token")
    body = {"json": {"level": "debug"}} if method == "PUT" else {}
    response = surface.request(method, path, headers=LOCAL | headers, **body)
    assert (response.status_code, error_of(response)["code"]) == (401, "unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"
    assert "secret" not in response.text
    assert surface.levels_asked == surface.service.debug_limits == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_token_anybody_may_from_anywhere(scheme):
    surface = Surface(admin_token="secret-token")
    headers = {"authorization": f"{scheme} secret-token", "host": "api.example", "x-forwarded-for": "10.1.2.3", "origin": "x"}
    assert surface.request("GET", "/debug/requests", address="10.1.2.3", headers=headers).status_code == 200


def test_probes_and_metrics_stay_open():
    surface = Surface(admin_token="secret-token")
    for path in ("/metrics", "/health", "/health/live", "/health/ready", "/v1/models", "/docs"):
        assert surface.request("GET", path, address="10.1.2.3").status_code == 200


def test_requests_are_told_as_the_service_tells_them(surface):
    surface.chat(headers={"x-request-id": "first"})
    response = surface.request("GET", "/debug/requests?limit=7", headers=LOCAL)
    body = response.json()
    assert set(body) == {"live", "num_live", "finished"}
    assert (body["num_live"], body["live"][0]["request_id"], body["live"][0]["state"]) == (1, "first", "decode")
    assert response.headers["cache-control"] == "no-store"
    surface.request("GET", "/debug/requests", headers=LOCAL)
    assert surface.service.debug_limits == [7, 50]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "1.5", "9" * 5000, "\u0663"])
def test_a_bad_limit_is_refused(surface, limit):
    response = surface.request("GET", "/debug/requests", params={"limit": limit}, headers=LOCAL)
    assert (response.status_code, error_of(response)["param"]) == (400, "limit")


def test_the_log_level_is_told_and_changed(surface):
    assert surface.request("GET", "/debug/log-level", headers=LOCAL).json() == {"level": current_level()}
    response = surface.request("PUT", "/debug/log-level", headers=LOCAL, json={"level": "debug"})
    assert response.status_code == 200
    assert surface.levels_asked == ["debug"]


def test_an_unknown_field_beside_the_level_is_named(surface):
    response = surface.request("PUT", "/debug/log-level", headers=LOCAL, json={"level": "info", "levle": 1})
    assert (response.status_code, response.headers["x-headrace-ignored-fields"]) == (200, "levle")


@pytest.mark.parametrize("body", [{"level": "loud"}, {"level": "DEBUG"}, {"level": 10}, {"level": None}, {}])
def test_a_bad_level_is_refused(surface, body):
    response = surface.request("PUT", "/debug/log-level", headers=LOCAL, json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, "level")
    assert surface.levels_asked == []


def test_other_methods_are_refused(surface):
    response = surface.request("DELETE", "/debug/log-level", headers=LOCAL)
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD, PUT")


def test_debug_routes_are_counted_by_template_met_01(surface):
    surface.request("GET", "/debug/requests?limit=3", headers=LOCAL)
    surface.request("PUT", "/debug/log-level", headers=LOCAL, json={"level": "x"})
    surface.request("GET", "/debug/log-level")
    assert surface.service.http_counts == [("/debug/requests", 200), ("/debug/log-level", 400), ("/debug/log-level", 403)]
