"""Models, health, metrics, the interface's description, unknown paths and methods."""

import html.parser

import pytest

from headrace import __version__
from headrace.gateway.http.openapi import OPERATIONS, openapi_document
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.telemetry.catalog import HTTP_ROUTES
from tests.http.fakes import MAX_MODEL_LEN, MODEL, Surface, error_of


def test_models(surface: Surface) -> None:
    body = surface.request("GET", "/v1/models").json()
    assert body["object"] == "list"
    entry = body["data"][0]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == (MODEL, "model", MAX_MODEL_LEN)
    assert surface.request("GET", f"/v1/models/{MODEL}").json() == entry


@pytest.mark.parametrize("name", ["nope", "a/b", "%2e%2e", "tiny/"])
def test_unknown_model_agrees_lim_13(surface: Surface, name: str) -> None:
    response = surface.request("GET", f"/v1/models/{name}")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_probes_answer_two_questions(surface: Surface) -> None:
    """OPS-04 and OPS-02: live while loading or draining, ready only when requests are welcome."""
    for path in ("/health", "/health/live", "/health/ready"):
        response = surface.request("GET", path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    surface.service.not_ready = RequestError("going away", code=ErrorCode.DRAINING, retry_after_seconds=5)
    assert surface.request("GET", "/health/live").status_code == 200
    for path in ("/health", "/health/ready"):
        response = surface.request("GET", path)
        assert response.status_code == 503
        assert response.json() == {"status": "draining", "reason": "going away"}
        assert (response.headers["retry-after"], response.headers["connection"]) == ("5", "close")
    refused = surface.chat()
    assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (503, "5", "close")
    assert error_of(refused)["code"] == "draining"
    assert surface.request("GET", "/v1/models").status_code == 200


def test_metrics_pass_through(surface: Surface) -> None:
    response = surface.request("GET", "/metrics")
    assert response.text == "# HELP x y\n"
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_routes_are_counted_by_template_met_01(surface: Surface) -> None:
    surface.request("GET", "/v1/models/whatever")
    surface.request("GET", "/wp-admin.php")
    surface.request("PUT", "/v1/models")
    surface.chat()
    surface.chat(temperature=5)
    assert surface.service.http_counts == [
        ("/v1/models/{model:path}", 404),
        ("unmatched", 404),
        ("/v1/models", 405),
        ("/v1/chat/completions", 200),
        ("/v1/chat/completions", 400),
    ]
    assert surface.service.rejections == ["invalid_value"]


def test_metrics_faults_never_fail_requests_met_08(surface: Surface) -> None:
    surface.service.metrics_fail = True
    assert surface.chat().status_code == 200
    assert surface.chat(temperature=5).status_code == 400


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat/completions/", "//v1/models", "/V1/models", "/v1/embeddings"])
def test_unknown_paths(surface: Surface, path: str) -> None:
    response = surface.request("GET", f"http://test{path}")
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"


def test_wrong_methods_say_which_are_right(surface: Surface) -> None:
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", f"/v1/models/{MODEL}", "GET, HEAD"),
    ):
        response = surface.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == allowed
        assert error_of(response)["code"] == "method_not_allowed"


def test_head_has_no_body(surface: Surface) -> None:
    response = surface.request("HEAD", "/version")
    assert response.status_code == 200
    assert response.content == b""
    assert int(response.headers["content-length"]) > 0


def test_version(surface: Surface) -> None:
    assert surface.request("GET", "/version").json() == {"version": __version__}


def test_openapi_describes_every_route_and_every_reference_resolves(surface: Surface) -> None:
    document = surface.request("GET", "/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    routed = {route.path.replace(":path", "") for route in surface.app._router.routes}  # type: ignore[attr-defined]
    assert routed == set(document["paths"])
    assert len({item["operationId"] for path in document["paths"].values() for item in path.values()}) == len(OPERATIONS)
    schemas = document["components"]["schemas"]

    def walk(node: object) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/components/schemas/") in schemas
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]


def test_examples_in_the_document_work(surface: Surface) -> None:
    for path, methods in openapi_document()["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body:
            example = body["content"]["application/json"]["example"]
            if "tokens" in example:
                example = {"tokens": [1, 2]}  # the document's ids are of a real vocabulary
            assert surface.request("POST", path, json=example).status_code == 200


def test_docs_page_is_whole_and_fetches_nothing(surface: Surface) -> None:
    response = surface.request("GET", "/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    opened: list[str] = []
    targets: set[str] = set()
    links: set[str] = set()

    class Checker(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            names = dict(attrs)
            assert tag not in {"script", "link", "img", "iframe"}
            assert "src" not in names
            if tag != "meta":
                opened.append(tag)
            if names.get("id"):
                assert names["id"] not in targets
                targets.add(str(names["id"]))
            if (names.get("href") or "").startswith("#"):
                links.add(str(names["href"])[1:])

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Checker().feed(response.text)
    assert opened == []
    assert links <= targets
    for operation in OPERATIONS:
        assert operation.path in response.text


def test_websockets_and_lifespan() -> None:
    import asyncio

    surface = Surface()
    sent: list[dict[str, object]] = []
    incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> dict[str, object]:
        return incoming.pop(0)

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(surface.app({"type": "lifespan"}, receive, send))  # type: ignore[arg-type]
    asyncio.run(surface.app({"type": "websocket", "path": "/"}, receive, send))  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
        "websocket.close",
    ]


def test_metrics_know_every_route_met_01(surface: Surface) -> None:
    """A route that the catalogue of metrics lacks would be counted as unmatched."""
    routed = {route.path for route in surface.app._router.routes}  # type: ignore[attr-defined]
    assert routed == set(HTTP_ROUTES)
