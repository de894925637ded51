"""A server over a fake engine for the tests of this folder."""

from serving_fixtures import client, engine, options, server

__all__ = ["client", "engine", "options", "server"]
