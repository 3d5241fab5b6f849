"""Who may publish what, as text: every event has exactly one writer among the services, and files hold no secret."""

from __future__ import annotations

import re
from typing import Any

import orjson
from typer.testing import CliRunner

from polar_common.cli.main import app
from polar_common.events import EVENT_TYPES
from polar_common.ownership import OWNERS
from polar_common.permissions import ADMIN, SERVICES, SYSTEM, USERS, authorization, inbox_prefix, users
from polar_common.topology import Topology, consumers

BY_NAME = {u.name: u for u in users(Topology())}


def matches(pattern: str, subject: str) -> bool:
    regex = re.escape(pattern).replace(r"\*", "[^.]+").replace(r"\.>", r"\..+")
    return re.fullmatch(regex, subject) is not None


def may_publish(user: str, subject: str) -> bool:
    one = BY_NAME[user]
    if not one.publish:
        return True
    allowed = any(matches(p, subject) for p in one.publish)
    return allowed and not any(matches(p, subject) for p in one.deny)


def example(pattern: str) -> str:
    return pattern.replace("*", "x")


def test_every_event_has_one_writer_among_the_services() -> None:
    assert set(OWNERS) == set(EVENT_TYPES)
    for kind, one in OWNERS.items():
        writers = [name for name in SERVICES if may_publish(name, example(one.pattern))]
        assert writers == [one.owner], kind


def test_only_the_admin_may_touch_streams() -> None:
    for verb in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE"):
        for stream in ("POLAR_EVENTS_s1", "POLAR_TRACES", "OTHER"):
            allowed = [name for name in BY_NAME if may_publish(name, f"$JS.API.STREAM.{verb}.{stream}")]
            assert allowed == [ADMIN]


def test_a_consumer_is_read_and_acknowledged_by_its_owner_alone() -> None:
    for spec in consumers(Topology()):
        for subject in (
            f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}",
            f"$JS.ACK.{spec.stream}.{spec.durable}.1.2.3.4.5",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{spec.stream}.{spec.durable}",
        ):
            allowed = {name for name in BY_NAME if may_publish(name, subject)} - {ADMIN}
            assert allowed <= {spec.owner}, subject
        assert may_publish(spec.owner, f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}")
        assert may_publish(spec.owner, f"polar.dlq.{spec.durable}.{spec.stream}.7")


def test_followers_may_bury_what_they_cannot_read() -> None:
    assert may_publish("ingest", "polar.dlq.scheduler.POLAR_EVENTS_s1.3")
    assert may_publish("analytics", "polar.dlq.analytics.POLAR_TRACES.3")
    assert not may_publish("gateway", "polar.dlq.analytics.POLAR_TRACES.3")


def test_trainers_and_proxies_make_consumers_of_their_own() -> None:
    for name, stream, durable in (("trainer", "POLAR_TRACES", "trainer-t"), ("proxy", "POLAR_EVENTS_s1", "proxy-e0")):
        for subject in (
            f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{durable}",
            f"$JS.API.CONSUMER.INFO.{stream}.{durable}",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}",
            f"$JS.ACK.{stream}.{durable}.1.2.3.4.5",
        ):
            assert may_publish(name, subject)
    assert not may_publish("trainer", "$JS.API.CONSUMER.DURABLE.CREATE.POLAR_EVENTS_s1.t")
    assert not may_publish("gateway", "$JS.API.CONSUMER.DURABLE.CREATE.POLAR_EVENTS_s1.g")


def test_nobody_hears_what_others_are_told() -> None:
    for name, user in BY_NAME.items():
        if name == ADMIN:
            continue
        assert user.subscribe == (f"{inbox_prefix(name)}.>",)
    assert len({u.subscribe for u in BY_NAME.values()}) == len(BY_NAME)


def test_the_configuration_may_name_variables_instead_of_passwords() -> None:
    text = authorization(list(BY_NAME.values()), lambda user: f"$POLAR_NATS_{user.upper()}")
    for user in USERS:
        assert f"user: {user}, password: $POLAR_NATS_{user.upper()}" in text
    quoted = authorization(list(BY_NAME.values()), dict.fromkeys(USERS, "secret"))
    assert quoted.count('password: "secret"') == len(USERS)


def test_rights_and_passwords_are_printed_for_scripts_too() -> None:
    def told(*options: str) -> list[dict[str, Any]]:
        done = CliRunner().invoke(app, ["log", "permissions", "--json", *options])
        assert done.exit_code == 0, done.output
        return [orjson.loads(line) for line in done.stdout.splitlines()]

    rights, fresh = told(), told("--passwords", "--variable", "X_")
    assert [r["name"] for r in rights] == [r["name"] for r in fresh] == list(USERS)
    assert rights[0]["variable"] == "POLAR_NATS_INGEST" and fresh[0]["variable"] == "X_INGEST"
    assert [r["name"] for r in rights if r["system"]] == [SYSTEM]
    assert all(tuple(r["publish"]) == BY_NAME[r["name"]].publish for r in rights if not r["system"])
    assert len({r["password"] for r in fresh}) == len(USERS)
