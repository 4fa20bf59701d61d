"""How sides and loads are written on the command line."""

import click
import pytest

from headrace.cli.bench_arms import VARIANT_SETTINGS, check_variant, parse_loads, parse_server, parse_variant
from headrace.loadtest.records import RunSettings

CLOSED = RunSettings(url="http://h", model="m", num_clients=2)
OPEN = RunSettings(url="http://h", model="m", arrival="poisson", rate=2.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=http://h:1", ("a", "http://h:1", None, None)),
        ("a=http://h:1/v1,model=x/y:z", ("a", "http://h:1/v1", "x/y:z", None)),
        ("new one=https://h,key=K,model=m,1", ("new one", "https://h", "m,1", "secret")),
    ],
)
def test_servers(text, expected):
    assert parse_server(text, {"K": "secret"}) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://h:1", "NAME=URL"),
        ("=http://h", "NAME=URL"),
        ("a=", "has no URL"),
        ("a=http://h,model=", "empty"),
        ("a=http://h,model=x,model=y", "given twice"),
        ("a=http://h,key=NOT_SET", "the environment variable NOT_SET is not set"),
    ],
)
def test_what_is_no_server(text, said):
    with pytest.raises(click.BadParameter, match=said):
        parse_server(text, {})


def test_variants_change_fields_of_the_settings_that_exist():
    name, changes = parse_variant("long:prompt-tokens=512,stream=no,temperature=0.5,salt=yes,shared-prefix-tokens=64")
    assert name == "long"
    assert changes == {
        "prompt_tokens": 512,
        "is_stream": False,
        "temperature": 0.5,
        "is_salted": True,
        "shared_prefix_tokens": 64,
    }
    assert parse_variant("same") == ("same", {})
    assert {field for field, _ in VARIANT_SETTINGS.values()} <= set(RunSettings.__struct_fields__)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (":rate=1", "give NAME"),
        ("a:colour=red", "no setting of a variant"),
        ("a:clients=0", "no value for clients"),
        ("a:rate=inf", "no value for rate"),
        ("a:stream=maybe", "no value for stream"),
        ("a:api=grpc", "no value for api"),
        ("a:rate=1,rate=2", "given twice"),
        ("a:rate", "no value for rate"),
    ],
)
def test_what_is_no_variant(text, said):
    with pytest.raises(click.BadParameter, match=said):
        parse_variant(text)


def test_a_change_that_nothing_reads_is_refused():
    with pytest.raises(click.UsageError, match="rate of a closed loop"):
        check_variant("a", CLOSED, {"rate": 2.0})
    with pytest.raises(click.UsageError, match="clients of an open loop"):
        check_variant("a", OPEN, {"num_clients": 2})
    check_variant("a", CLOSED, {"num_clients": 2})
    check_variant("a", OPEN, {"rate": 2.0})


def test_loads_are_sorted_and_checked():
    assert parse_loads("8, 1,4,1", is_whole=True) == [1, 4, 8]
    assert parse_loads("0.5,2", is_whole=False) == [0.5, 2]
    for text, is_whole in (("0.5,2", True), ("0,1", True), ("1,x", False), ("-1,2", False), ("", True), ("1,nan", False)):
        with pytest.raises(click.BadParameter, match="above 0"):
            parse_loads(text, is_whole=is_whole)
    with pytest.raises(click.BadParameter, match="two or more"):
        parse_loads("4,4", is_whole=True)
