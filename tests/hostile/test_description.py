"""The OpenAPI description and the routes that the app really has agree, in both directions; needs no server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from anabranch import wire
from anabranch_server.engine.routes import router
from anabranch_server.openapi import PREFIX, ROUTES, description
from tests.serving import Served

ITSELF = ("GET", f"{PREFIX}/openapi.json")


def test_the_description_has_the_routes_that_there_are_and_no_others():
    routes = [
        route for route in router(SimpleNamespace()).routes if isinstance(route, APIRoute) and route.include_in_schema
    ]
    there = {(method, route.path) for route in routes for method in route.methods or ()}
    described = {(method.upper(), path) for path, methods in description()["paths"].items() for method in methods}
    assert there - {ITSELF} == described
    assert {(route.method.upper(), PREFIX + route.path) for route in ROUTES} == described


def test_nothing_of_ours_is_in_fastapis_own_description_as_a_body():
    """Our routes parse by themselves, so FastAPI's own /openapi.json can say nothing of them, and must not fail."""
    app = FastAPI()
    app.include_router(router(SimpleNamespace()))
    assert set(app.openapi()["paths"]) >= set(description()["paths"])


def test_every_status_that_is_described_is_one_of_the_contract():
    for path, methods in description()["paths"].items():
        for method, operation in methods.items():
            wrong = {int(status) for status in operation["responses"]} - {200, 204, *wire.HTTP_STATUS.values()}
            assert not wrong, (method, path)


@pytest.mark.engine
def test_the_server_serves_the_description(besieged: Served):
    assert besieged.get(ITSELF[1]).json() == description()
